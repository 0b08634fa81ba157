"""The model over HTTP, as OpenAI's API: `app.py` has the routes, `bridge.py` the way to the engine and back.

Needs the extra `serve`; nothing else in kukri imports this package but the commands that run it.
"""
