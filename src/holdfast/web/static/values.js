// Values in the exact rendering of the API. A value that JSON does not have is an object with one key that begins with "$".

const NAMES = {
  $bytes: "bytes", $tuple: "tuple", $set: "set", $frozenset: "frozenset", $dict: "dict", $int: "int",
  $float: "float", $str: "str", $datetime: "datetime", $date: "date", $time: "time",
  $timedelta: "timedelta", $decimal: "Decimal", $uuid: "UUID", $ext: "ext", $raw: "raw",
};

/** The cut value that the server sent in place of a long one, or null. */
export function folded(value) {
  return isObject(value) && isObject(value.$folded) ? value.$folded : null;
}

/** [tag, content] of a value that JSON has no word for, or null. */
export function tagged(value) {
  if (!isObject(value)) return null;
  const keys = Object.keys(value);
  return keys.length === 1 && Object.hasOwn(NAMES, keys[0]) ? [keys[0], value[keys[0]]] : null;
}

export function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** A dict's own key: one dollar sign was put before those that begin with one. */
export function ownKey(key) {
  return key.startsWith("$$") ? key.slice(1) : key;
}

/** The name of a value's type. */
export function typeName(value) {
  const cut = folded(value);
  if (cut) return cut.kind;
  const tag = tagged(value);
  if (tag) return NAMES[tag[0]];
  if (value === null) return "None";
  if (Array.isArray(value)) return "list";
  return { string: "str", boolean: "bool", number: Number.isInteger(value) ? "int" : "float" }[typeof value] ?? "dict";
}

/** How many bytes a text in base64 stands for. */
export function byteCount(base64) {
  return Math.floor((base64.replace(/=+$/, "").length * 3) / 4);
}

/** A value in one line of at most about `width` characters. */
export function brief(value, width = 120) {
  const line = sketch(value, width);
  return line.length <= width ? line : `${line.slice(0, width - 1)}…`;
}

/** A value as text that may be read: strings as they are, everything else as indented JSON. */
export function plain(value) {
  const cut = folded(value);
  if (cut && cut.kind === "str") return `${cut.start}…`;
  return typeof value === "string" ? value : JSON.stringify(value, null, 2);
}

/** A path as one writes it in Python: state.messages[3].content */
export function pathText(path) {
  let text = "state";
  for (const step of path) {
    if (typeof step === "string" && /^[\p{L}_][\p{L}\p{N}_]*$/u.test(step)) text += `.${step}`;
    else text += `[${typeof step === "string" ? JSON.stringify(step) : sketch(step, 60)}]`;
  }
  return text;
}

/** Whether the API can be asked for this path: keys of other types have no place in an address. */
export function isAskable(path) {
  return path.length > 0 && path.every((step) => typeof step === "string" || Number.isSafeInteger(step));
}

function sketch(value, width) {
  const cut = folded(value);
  if (cut) {
    if (cut.kind === "str") return JSON.stringify(`${cut.start.slice(0, width)}…`);
    return `${cut.kind} of ${cut.length}`;
  }
  const tag = tagged(value);
  if (tag) return sketchTag(tag, width);
  if (value === null) return "None";
  if (value === true || value === false) return value ? "True" : "False";
  if (typeof value === "string") return JSON.stringify(value.length > width ? `${value.slice(0, width)}…` : value);
  if (Array.isArray(value)) return sketchMany(value, (item) => sketch(item, width), width, "[]");
  if (isObject(value)) {
    return sketchMany(Object.entries(value), ([key, item]) => `${ownKey(key)}: ${sketch(item, width)}`, width, "{}");
  }
  return String(value);
}

function sketchTag([name, content], width) {
  if (name === "$tuple") return sketchMany(content, (item) => sketch(item, width), width, "()");
  if (name === "$set" || name === "$frozenset") return sketchMany(content, (item) => sketch(item, width), width, "{}");
  if (name === "$bytes") return folded(content) ? "bytes(…)" : `bytes(${byteCount(content)})`;
  if (name === "$datetime" || name === "$time") return String(content[0]);
  if (name === "$dict") return `dict of ${content.length}`;
  return typeof content === "string" ? content : JSON.stringify(content);
}

function sketchMany(items, show, width, [open, close]) {
  let text = open;
  for (const [n, item] of items.entries()) {
    if (text.length > width) return `${text}, …${close}`;
    text += (n ? ", " : "") + show(item);
  }
  return text + close;
}
