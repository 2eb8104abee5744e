// A little Markdown, for reading: paragraphs, headings, lists, quotes, code, emphasis and links. Never HTML.

import { el, webLink } from "./dom.js";

const LONGEST_MARKDOWN = 40_000;
const INLINE = /(`+)([^`][\s\S]*?)\1(?!`)|\*\*(?=\S)([^*]+?)\*\*|\*(?=\S)([^*\n]+?)\*|(?<![\p{L}\p{N}_])_(?=\S)([^_\n]+?)_(?![\p{L}\p{N}_])|\[([^\]\n]{1,300})\]\(([^()\s]{1,2000})\)|(https?:\/\/[^\s<>()"']{1,2000}[^\s<>()"'.,;:!?])/gu;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;

/** @returns {Node[]} */
export function markdown(text) {
  if (text.length > LONGEST_MARKDOWN) return [el("pre", { class: "text" }, text)];
  return blocksOf(text.split("\n"));
}

function blocksOf(lines) {
  const out = [];
  let n = 0;
  while (n < lines.length) {
    const line = lines[n];
    const fence = /^\s{0,3}(```+|~~~+)\s*([\w+#.-]*)/.exec(line);
    const heading = /^(#{1,6})\s+(.*?)\s*#*$/.exec(line);
    if (!line.trim()) n++;
    else if (fence) {
      let end = n + 1;
      while (end < lines.length && !lines[end].trimStart().startsWith(fence[1])) end++;
      out.push(el("pre", { class: "code", "data-language": fence[2] || null }, el("code", {}, lines.slice(n + 1, end).join("\n"))));
      n = end + 1;
    } else if (heading) {
      out.push(el(`h${Math.min(heading[1].length + 3, 6)}`, { class: "heading" }, inline(heading[2])));
      n++;
    } else if (/^\s{0,3}([-*_])(\s*\1){2,}\s*$/.test(line)) {
      out.push(el("hr"));
      n++;
    } else if (line.startsWith(">")) {
      let end = n;
      while (end < lines.length && lines[end].startsWith(">")) end++;
      out.push(el("blockquote", {}, blocksOf(lines.slice(n, end).map((quoted) => quoted.replace(/^> ?/, "")))));
      n = end;
    } else if (ITEM.test(line)) {
      const [list, end] = listOf(lines, n);
      out.push(list);
      n = end;
    } else {
      let end = n + 1;
      while (end < lines.length && lines[end].trim() && !/^(#{1,6}\s|>|\s{0,3}(```|~~~))/.test(lines[end]) && !ITEM.test(lines[end])) end++;
      out.push(el("p", {}, inline(lines.slice(n, end).join("\n"))));
      n = end;
    }
  }
  return out;
}

/** A list, with those that are indented deeper inside their items. */
function listOf(lines, start) {
  const [, indent, bullet] = ITEM.exec(lines[start]);
  const numbered = /\d/.test(bullet);
  const list = el(numbered ? "ol" : "ul", numbered ? { start: parseInt(bullet, 10) } : {});
  let n = start;
  while (n < lines.length) {
    const item = ITEM.exec(lines[n]);
    if (!item || item[1].length < indent.length || (item[1].length === indent.length && /\d/.test(item[2]) !== numbered)) break;
    if (item[1].length > indent.length + 1 && list.lastChild) {
      const [inner, end] = listOf(lines, n);
      list.lastChild.append(inner);
      n = end;
      continue;
    }
    let text = item[3];
    for (n++; n < lines.length && /^\s+\S/.test(lines[n]) && !ITEM.test(lines[n]); n++) text += `\n${lines[n].trim()}`;
    list.append(el("li", {}, inline(text)));
  }
  return [list, n];
}

function inline(text) {
  const out = [];
  let from = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, , code, strong, starred, underlined, label, target, bare] = found;
    if (found.index > from) out.push(text.slice(from, found.index));
    from = found.index + whole.length;
    if (code !== undefined) out.push(el("code", {}, code.trim()));
    else if (strong !== undefined) out.push(el("strong", {}, inline(strong)));
    else if (starred !== undefined || underlined !== undefined) out.push(el("em", {}, starred ?? underlined));
    else if (target !== undefined) out.push(webLink(target, label));
    else out.push(webLink(bare, bare));
  }
  if (from < text.length) out.push(text.slice(from));
  return out;
}
