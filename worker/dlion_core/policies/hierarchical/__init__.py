"""The policy `hierarchical`: means within a site, coded updates between the sites' gateways."""
