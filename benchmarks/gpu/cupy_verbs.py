def check(shape):
    yield {"check": "x", "error": 0.0, "bound": 0.0, "ok": True}
