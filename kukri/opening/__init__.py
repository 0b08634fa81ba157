"""From options to an open model: each option is declared once, and loading reads them."""
