// Parts of rendered values: the work of the server, for a page without one.

import { isObject, ownKey, tagged, typeName } from "./values.js";

const WITH_ENTRIES = ["list", "dict"];

/** Whether its label, a tag or its metadata have this text, whatever their case. */
export function isMarked({ label, tags, meta }, text) {
  return JSON.stringify([label, tags, meta]).toLowerCase().includes(JSON.stringify(text).slice(1, -1).toLowerCase());
}

/** KEY=VALUE, where the value is JSON if it is some, else the text itself. */
export function holdsPair(meta, key, text) {
  const found = childAt(meta, key);
  return found === text || JSON.stringify(found) === text;
}

/** The text around the first place in a value that has it, and where it is in that; null if none has. */
export function excerptOf(value, text) {
  if (typeof value === "string") {
    const at = value.toLowerCase().indexOf(text.toLowerCase()), begin = Math.max(at - 40, 0);
    return at < 0 ? null : [value.slice(begin, at + 120), at - begin, at - begin + text.length];
  }
  if (typeof value !== "object" || value === null) return null;
  for (const [key, each] of Object.entries(value)) {
    const found = excerptOf(each, text) ?? (Array.isArray(value) ? null : excerptOf(key, text));
    if (found !== null) return found;
  }
  return null;
}

/** The value at a key or position of a rendered value; undefined if there is none. */
export function childAt(value, step) {
  if (Array.isArray(value)) return Number.isInteger(step) ? value.at(step) : undefined;
  const tag = tagged(value);
  if (tag) return entriesOf(value).find(([key]) => key === step)?.[1];
  if (!isObject(value)) return undefined;
  const key = String(step).startsWith("$") ? `$${step}` : String(step);
  return Object.hasOwn(value, key) ? value[key] : undefined;
}

export function entriesOf(value) {
  if (Array.isArray(value)) return [...value.entries()];
  const tag = tagged(value);
  if (tag) return tag[0] === "$dict" ? tag[1] : tag[0] === "$tuple" ? [...tag[1].entries()] : [];
  return isObject(value) ? Object.entries(value).map(([key, each]) => [ownKey(key), each]) : [];
}

export function sketchOf(value) {
  const kind = typeName(value), size = JSON.stringify(value)?.length ?? 0;
  if (WITH_ENTRIES.includes(kind)) return { kind, size, length: entriesOf(value).length };
  return { kind, size, length: typeof value === "string" ? value.length : null, value };
}

/** Differences as the library lists them: equal items at both ends of two lists are left out. */
export function differencesOf(a, b) {
  return [...differences(a, b, [])];
}

function* differences(a, b, path) {
  if (JSON.stringify(a) === JSON.stringify(b)) return;
  if (Array.isArray(a) && Array.isArray(b)) {
    const same = (x, y) => JSON.stringify(x) === JSON.stringify(y);
    let start = 0, end = 0;
    const most = Math.min(a.length, b.length);
    while (start < most && same(a[start], b[start])) start += 1;
    while (end < most - start && same(a.at(-1 - end), b.at(-1 - end))) end += 1;
    const [old, fresh] = [a.slice(start, a.length - end), b.slice(start, b.length - end)];
    for (const [n, item] of fresh.entries()) {
      if (n < old.length) yield* differences(old[n], item, [...path, start + n]);
      else yield { kind: "added", path: [...path, start + n], after: item };
    }
    for (let n = fresh.length; n < old.length; n += 1) yield { kind: "removed", path: [...path, start + n], before: old[n] };
    return;
  }
  if (typeName(a) === "dict" && typeName(b) === "dict") {
    const [old, fresh] = [new Map(entriesOf(a)), new Map(entriesOf(b))];
    for (const [key, before] of old) if (!fresh.has(key)) yield { kind: "removed", path: [...path, key], before };
    for (const [key, after] of fresh) {
      if (old.has(key)) yield* differences(old.get(key), after, [...path, key]);
      else yield { kind: "added", path: [...path, key], after };
    }
    return;
  }
  yield { kind: "changed", path, before: a, after: b };
}
