"""The only folder that knows Jupyter: magics, displays, and the shell inside each rank."""
