// All data comes through here, so that a page without a server can bring its own.

/** An error of the server, in its words. */
export class Refused extends Error {
  constructor(told, status) {
    super(told.message);
    this.kind = told.error;
    this.hint = told.hint;
    this.status = status;
  }
}

export const api = {
  /** @param {Object<string, any>} [params] null leaves one out; a list is a path */
  async get(name, params = {}, signal = undefined) {
    const query = new URLSearchParams();
    for (const [key, value] of Object.entries(params)) {
      if (value === null || value === undefined || value === "") continue;
      query.set(key, Array.isArray(value) ? JSON.stringify(value) : String(value));
    }
    return answered(await reached(fetch(`api/${name}?${query}`, { signal })));
  },

  /** @param {Object<string, string>} [raw] parameters that are JSON already, sent to the letter */
  async post(name, params, raw = {}) {
    const pairs = Object.entries(params).map(([key, value]) => `${JSON.stringify(key)}:${JSON.stringify(value)}`);
    for (const [key, text] of Object.entries(raw)) pairs.push(`${JSON.stringify(key)}:${text}`);
    const headers = { "content-type": "application/json" };
    const body = `{${pairs.join(",")}}`;
    return answered(await reached(fetch(`api/${name}`, { method: "POST", headers, body })));
  },

  /**
   * `heard` gets each event; `connected` is told whenever it can be heard again, or no longer. A page that
   * nobody sees does not listen: a browser has six connections for all pages of one place.
   */
  listen(heard, connected) {
    let source = null, soon = null;
    const end = () => {
      clearTimeout(soon);
      source?.close();
      source = null;
    };
    const begin = () => {
      end();
      if (document.hidden) return;
      source = new EventSource("api/events");
      source.onopen = () => connected(true);
      source.onmessage = (event) => heard(exactJson(event.data));
      source.onerror = () => {
        connected(false);
        if (source.readyState === EventSource.CLOSED) soon = setTimeout(begin, 2000);
      };
    };
    document.addEventListener("visibilitychange", () => (document.hidden ? end() : begin()));
    begin();
  },
};

async function reached(request) {
  try {
    return await request;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused({
      error: "Unreachable", message: "The server does not answer.", hint: "Is `holdfast serve` still running?",
    }, 0);
  }
}

async function answered(response) {
  const text = await response.text();
  let told;
  try {
    told = exactJson(text);
  } catch {
    told = { error: "NoJson", message: `The server answered ${response.status} without JSON.`, hint: null };
    throw new Refused(told, response.status);
  }
  if (!response.ok) throw new Refused(told, response.status);
  return told;
}

/** JSON whose integers beyond 2**53 stay exact: they become {"$int": …}, as longer ones are. */
function exactJson(text) {
  if (!/[:,[]\s*-?\d{16}/.test(text)) return JSON.parse(text);
  return JSON.parse(text, (_, value, context) => {
    const inexact = Number.isInteger(value) && !Number.isSafeInteger(value);
    return inexact && /^-?\d+$/.test(context?.source ?? "") ? { $int: context.source } : value;
  });
}
