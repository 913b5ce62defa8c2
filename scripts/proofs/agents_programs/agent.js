// An agent in JavaScript, with fetch alone. The task is a line of JSON on stdin.
const task = JSON.parse(require('fs').readFileSync(0, 'utf8'))
const parameters = {type: 'object', properties: {item: {type: 'string'}}, required: ['item']}
const tools = [{type: 'function', function: {name: 'look', description: 'Look an item up.', parameters}}]
const messages = [
  {role: 'system', content: 'desk'},
  {role: 'user', content: task.question},
]

async function main() {
  for (;;) {
    const reply = await fetch(process.env.OPENAI_BASE_URL + '/chat/completions', {
      method: 'POST',
      headers: {
        'Content-Type': 'application/json',
        Authorization: 'Bearer ' + process.env.OPENAI_API_KEY,
      },
      body: JSON.stringify({model: 'policy', messages, tools}),
    })
    if (!reply.ok) throw new Error(await reply.text())
    const message = (await reply.json()).choices[0].message
    messages.push(message)
    if (!message.tool_calls) return console.log(message.content)
    for (const call of message.tool_calls) {
      messages.push({role: 'tool', tool_call_id: call.id, content: 'blue, 40 W'})
    }
  }
}

main()
