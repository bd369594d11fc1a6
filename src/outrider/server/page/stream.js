// Requests to the server: one chat completion, streamed or whole, and errors as sentences.

/** An error for the user: `text` is a sentence, `status` the HTTP status or 0. */
export class Trouble extends Error {
  constructor(text, status = 0) {
    super(text);
    this.status = status;
  }
}

const GONE = "The server does not answer. Is `outrider serve` still running?";
const LOCKED = "The server requires an API key: enter it in the settings and send again.";
const BROKEN = "The connection was lost during the answer.";

function headers(key) {
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble(GONE);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** Describe an error response in one sentence. */
async function refusal(response) {
  const body = await response.json().catch(() => null);
  const said = body?.error?.message ?? response.statusText;
  const sentence = said ? said.replace(/\.?$/, ".") : "";
  const status = response.status;
  if (status === 401) return new Trouble(LOCKED, status);
  if (status === 429) {
    const wait = Number(response.headers.get("retry-after"));
    const when = wait > 0 ? `in ${wait} ${wait === 1 ? "second" : "seconds"}` : "in a moment";
    return new Trouble(`The server is full: try again ${when}.`, status);
  }
  if (status === 503) return new Trouble(`The server accepts no requests at present: ${sentence}`, status);
  if (status >= 500) return new Trouble(`The server answered with ${status}: ${sentence}`, status);
  return new Trouble(`The server rejected the request: ${sentence}`, status);
}

/** Fetch the description of the model and its methods. */
export async function fetchInfo(key) {
  const response = await ask("playground/info", { headers: headers(key) });
  return response.json();
}

/** A chat completion as one object. */
export async function complete(request, key, signal) {
  const body = JSON.stringify({ ...request, trace: true });
  const response = await ask("v1/chat/completions", { method: "POST", headers: headers(key), body, signal });
  return response.json();
}

/** The chunks of a streamed chat completion, as objects, until [DONE]. */
export async function* chat(request, key, signal) {
  const body = JSON.stringify({ ...request, stream: true, trace: true, stream_options: { include_usage: true } });
  const response = await ask("v1/chat/completions", { method: "POST", headers: headers(key), body, signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Trouble(`The server failed during the answer: ${chunk.error.message}`);
    yield chunk;
  }
  throw new Trouble(BROKEN);
}

/** The data of server-sent events. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } catch (error) {
    throw error.name === "AbortError" ? error : new Trouble(BROKEN);
  } finally {
    reader.cancel().catch(() => {});
  }
}
