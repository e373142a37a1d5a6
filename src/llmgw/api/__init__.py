"""The wire between the roles: paths, JSON, client."""
