"""What dlion run and dlion simulate start on this machine."""
