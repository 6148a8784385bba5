"""The server on Ray: engines as deployments of Ray Serve, before them the router. Needs `pip install "kvarn[ray]"`."""
