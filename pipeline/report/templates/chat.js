// The page of `chat --web`: lines of the conversation come from its server, words go there.
let shown = 0;

async function ask() {
  try {
    const query = new URLSearchParams(location.search);
    query.set("since", shown);
    const lines = await (await fetch(`lines?${query}`)).json();
    for (const [name, text] of lines) {
      const box = element("div", name === "agent" ? "message sampled" : "message");
      box.append(element("div", "role", name), element("div", "text", text));
      byId("lines").append(box);
      box.scrollIntoView({ block: "nearest" });
    }
    shown += lines.length;
    byId("live").textContent = "";
  } catch {
    byId("live").textContent = "The conversation is over: its server has ended.";
  }
  setTimeout(ask, 500);
}

byId("say")?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const words = byId("words").value;
  byId("words").value = "";
  // A page of another site cannot send this header.
  await fetch(`say${location.search}`, { method: "POST", headers: { "X-Page": "1" }, body: words });
});

ask();
