"""The web page that the server shows a person."""
