"""The product's own agents in a world of virtual time, and the failure studies."""
