"""What makes the HTTP client of each address, which the worker replaces by one for all."""

NUMBER = 0


class BaseClientConfig:
    def __init__(self, api_key_var):
        self.api_key_var = api_key_var


def build_async_httpx(config):
    global NUMBER
    NUMBER += 1
    assert NUMBER == 1
    return object()
