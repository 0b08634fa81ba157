"""How the server is, and the document of all its endpoints."""
