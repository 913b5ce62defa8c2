// The page of `chat --web`: lines of the conversation come from its server, words go there.
let shown = 0;
let isLost = false;

function wait(isWaiting) {
  for (const part of byId("say").elements) part.disabled = !isWaiting;
  if (isWaiting) byId("words").focus({ preventScroll: true });
}

async function ask() {
  try {
    const query = new URLSearchParams(location.search);
    query.set("since", shown);
    const found = await (await fetch(`lines?${query}`)).json();
    for (const [name, text] of found.lines) {
      const box = element("div", name === "agent" ? "message sampled" : "message");
      box.append(element("div", "role", name), element("div", "text", text));
      byId("lines").append(box);
      box.scrollIntoView({ block: "nearest" });
    }
    shown += found.lines.length;
    if (byId("words").disabled === found.is_waiting) wait(found.is_waiting);
    if (isLost) byId("live").textContent = "";
    isLost = false;
  } catch {
    wait(false);
    isLost = true;
    byId("live").textContent = "The conversation is over: its server has ended.";
  }
  setTimeout(ask, 500);
}

byId("say").addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = byId("words").value;
  // A page of another site cannot send this header.
  const options = { method: "POST", headers: { "X-Page": "1" }, body };
  const answer = await fetch(`say${location.search}`, options).catch(() => ({ ok: false }));
  if (!answer.ok) {
    byId("live").textContent = "This was not sent: it is too long, or the server has ended.";
    return;
  }
  byId("words").value = byId("live").textContent = "";
  wait(false);
});

ask();
