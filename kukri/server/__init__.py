"""Models over HTTP: `app.py` gathers the routes of each API, `models/bridge.py` is the way to the engine.

Needs the extra `serve`; nothing else in kukri imports this package but the commands that run it.
"""
