#!/usr/bin/env bash
# An agent of bash and curl. The task is a line of JSON on stdin.
set -euo pipefail
read -r task
PYTHON=${PYTHON:-python3}
tools='[{"type": "function", "function": {"name": "look", "description": "Look an item up.",
    "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}}}]'
question=$("$PYTHON" -c 'import json, sys; print(json.dumps(json.loads(sys.argv[1])["question"]))' "$task")
history="{\"role\": \"system\", \"content\": \"desk\"}, {\"role\": \"user\", \"content\": $question}"

ask() {
    curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
        -H 'Content-Type: application/json' -d "{\"model\": \"policy\", \"tools\": $tools, \"messages\": [$history]}"
}

# Prints the message, then the call's id if there is one, or else the text.
read_reply='
import json, sys
message = json.load(sys.stdin)["choices"][0]["message"]
calls = message.get("tool_calls")
print(json.dumps(message), "call" if calls else "text", calls[0]["id"] if calls else message["content"], sep="\n")'

for _ in 1 2 3; do
    { read -r message; read -r kind; read -r value; } < <(ask | "$PYTHON" -c "$read_reply")
    if [ "$kind" = text ]; then
        echo "$value"
        exit
    fi
    history="$history, $message, {\"role\": \"tool\", \"tool_call_id\": \"$value\", \"content\": \"blue, 40 W\"}"
done
