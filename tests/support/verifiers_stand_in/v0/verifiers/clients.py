"""The client of the stand-in, which asks the address that it was given."""

import aiohttp


class OpenAIChatCompletionsClient:
    def __init__(self, client):
        self.url = f"{client.base_url}/chat/completions"

    async def message(self, messages):
        body = {"model": "policy", "messages": messages}
        async with aiohttp.ClientSession() as session, session.post(self.url, json=body) as reply:
            if reply.status != 200:
                raise ConnectionError(await reply.text())
            return (await reply.json())["choices"][0]["message"]
