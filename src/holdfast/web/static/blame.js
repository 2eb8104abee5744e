// In which checkpoint a value last changed.

import { api } from "./api.js";
import { el, put } from "./dom.js";
import { awaited, valueNode } from "./shown.js";
import { addressOf } from "./view.js";
import { age, shortId, titleOf } from "./words.js";

/** Show it in a node, as of the checkpoint `id`. Asked again, it closes. */
export function showBlame(node, id, path, lead = "Last changed in ") {
  if (node.firstChild) return put(node);
  return awaited(node, api.get("blame", { id, path }), ({ checkpoint, before, after }) => [
    el("p", {}, lead,
      el("a", { href: addressOf({ session: checkpoint.session, id: checkpoint.id, other: null, pane: "detail" }) }, checkpoint.damaged ? shortId(checkpoint.id) : `step ${checkpoint.step}, ${titleOf(checkpoint)}`),
      checkpoint.created_at && ` (${age(checkpoint.created_at)})`),
    el("div", { class: "was" }, before === undefined ? el("span", { class: "quiet" }, "was not there before") : valueNode(before)),
    el("div", { class: "is" }, valueNode(after)),
  ]);
}
