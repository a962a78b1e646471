"""Generated from `api/proto` by `make generate`; do not edit."""
