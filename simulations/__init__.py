"""The product's own agents in a world of virtual time, failure studies, and published values."""
