// Messages of the usual shapes (OpenAI chat, OpenAI responses, Anthropic, LangChain), read into one.

import { folded, isObject } from "./values.js";

const ROLES = new Map([["human", "user"], ["ai", "assistant"], ["developer", "system"], ["function", "tool"]]);
const CALLS = new Set(["function_call", "custom_tool_call", "mcp_call", "computer_call"]);
const OUTPUTS = new Set(["function_call_output", "custom_tool_call_output", "computer_call_output"]);
const CONVERSATIONS = new Set(["messages", "history", "conversation", "items", "input"]);

/**
 * A message: who says it, and its blocks. Each block has a `kind` (text, thinking, call, result, image or
 * other), and the `path` of its value within the message.
 * @returns {{role: string, blocks: Array<Object>} | null} null for what is no message
 */
export function readMessage(value) {
  if (!isObject(value) || folded(value)) return null;
  if (typeof value.role === "string") return { role: ROLES.get(value.role) ?? value.role, blocks: chatBlocks(value) };
  if (typeof value.type !== "string") return null;
  if (CALLS.has(value.type)) return { role: "assistant", blocks: [callBlock(value.call_id ?? value.id, value.name ?? value.type, value.arguments ?? value.input ?? value.action, [])] };
  if (OUTPUTS.has(value.type)) return { role: "tool", blocks: [resultBlock(value.call_id, value.output, ["output"])] };
  if (value.type === "reasoning") return { role: "assistant", blocks: reasoningBlocks(value) };
  if (["human", "ai", "system", "tool"].includes(value.type) && "content" in value) return { role: ROLES.get(value.type) ?? value.type, blocks: chatBlocks(value) };
  return null;
}

/** Where in a conversation a path leads: which list, which message, and what of it; or null. */
export function messagePlace(path) {
  const n = path.findIndex((step, i) => i > 0 && Number.isInteger(step) && CONVERSATIONS.has(path[i - 1]));
  return n < 0 ? null : { list: path.slice(0, n), index: path[n], rest: path.slice(n + 1) };
}

export function isConversation(value) {
  return Array.isArray(value) && value.length > 0 && value.every((item) => readMessage(item) !== null);
}

function chatBlocks(value) {
  if (value.role === "tool" || value.type === "tool") {
    return [resultBlock(value.tool_call_id, value.content, ["content"], value.status === "error")];
  }
  const blocks = contentBlocks(value.content, ["content"]);
  if (typeof value.reasoning_content === "string") blocks.unshift({ kind: "thinking", text: value.reasoning_content, path: ["reasoning_content"] });
  if (typeof value.refusal === "string") blocks.push({ kind: "text", text: value.refusal, path: ["refusal"] });
  if (Array.isArray(value.tool_calls)) value.tool_calls.forEach((call, n) => blocks.push(chatCall(call, ["tool_calls", n])));
  return blocks;
}

function chatCall(call, path) {
  if (isObject(call?.function)) return callBlock(call.id, call.function.name, call.function.arguments, [...path, "function", "arguments"]);
  if (isObject(call) && typeof call.name === "string") return callBlock(call.id, call.name, call.args ?? call.arguments ?? call.input, path);
  return { kind: "other", value: call, path };
}

function contentBlocks(content, path) {
  if (content === null || content === undefined || content === "") return [];
  if (typeof content === "string" || folded(content)?.kind === "str") return [{ kind: "text", text: content, path }];
  if (!Array.isArray(content)) return [{ kind: "other", value: content, path }];
  return content.map((part, n) => partBlock(part, [...path, n]));
}

function partBlock(part, path) {
  if (typeof part === "string") return { kind: "text", text: part, path };
  if (!isObject(part) || folded(part)) return { kind: "other", value: part, path };
  switch (part.type) {
    case "text": case "input_text": case "output_text":
      return { kind: "text", text: part.text, path: [...path, "text"] };
    case "thinking": case "reasoning":
      return { kind: "thinking", text: part.thinking ?? part.text ?? part.reasoning ?? "", path: [...path, part.thinking === undefined ? "text" : "thinking"] };
    case "tool_use": case "server_tool_use":
      return callBlock(part.id, part.name, part.input, [...path, "input"]);
    case "tool_result": case "web_search_tool_result":
      return resultBlock(part.tool_use_id, part.content, [...path, "content"], part.is_error === true);
    case "image": case "image_url": case "input_image":
      return imageBlock(part, path);
    default:
      return { kind: "other", value: part, path };
  }
}

function imageBlock(part, path) {
  const { source } = part;
  if (isObject(source) && source.type === "base64") {
    if (typeof source.data === "string") return { kind: "image", src: `data:${source.media_type};base64,${source.data}`, path };
    return { kind: "image", lead: `data:${source.media_type};base64,`, path: [...path, "source", "data"], length: folded(source.data)?.length };
  }
  const given = isObject(part.image_url) ? part.image_url.url : part.image_url ?? source?.url;
  const where = isObject(part.image_url) ? [...path, "image_url", "url"] : [...path, "image_url"];
  if (typeof given === "string") return { kind: "image", src: given, path: where };
  if (folded(given)) return { kind: "image", lead: "", path: where, length: folded(given).length };
  return { kind: "other", value: part, path };
}

function reasoningBlocks(value) {
  const summary = Array.isArray(value.summary) ? value.summary : [];
  return summary.map((part, n) => ({ kind: "thinking", text: part?.text ?? "", path: ["summary", n, "text"] }));
}

function callBlock(id, name, given, path) {
  return { kind: "call", id: typeof id === "string" ? id : null, name: typeof name === "string" ? name : "?", arguments: parsed(given), path };
}

function resultBlock(id, value, path, error = false) {
  return { kind: "result", id: typeof id === "string" ? id : null, value, error, path };
}

/** Arguments that are JSON in a string, as OpenAI sends them. */
function parsed(given) {
  if (typeof given !== "string") return given;
  try {
    return JSON.parse(given);
  } catch {
    return given;
  }
}
