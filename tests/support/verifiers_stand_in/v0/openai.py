"""What an environment of verifiers v0 needs of the package openai."""


class AsyncOpenAI:
    def __init__(self, base_url, api_key, timeout):
        assert (api_key, timeout) == ("unused", None)
        self.base_url = base_url

    def with_options(self, base_url):
        return type(self)(base_url, "unused", None)
