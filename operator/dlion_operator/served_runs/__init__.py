"""The runs that this site's coordinator serves, and what other sites report of them."""
