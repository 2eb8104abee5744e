// Messages of the usual shapes, read into one: those of OpenAI's two APIs, Anthropic, LangChain, Strands
// (Bedrock's) and pydantic-ai, and as the adapters store them. All that the page knows of shapes is here.

import { folded, isObject, tagged } from "./values.js";

/** Where in a state conversations lie, the most usual place first; as runs/messages.py has it. */
export const CONVERSATION_PLACES = [["messages"], ["history"], ["conversation"], ["items"], ["input"], ["entries"], ["data", "messages"]];

const ROLES = new Map([["human", "user"], ["ai", "assistant"], ["developer", "system"], ["function", "tool"]]);
const CALLS = new Set(["function_call", "custom_tool_call", "mcp_call", "computer_call"]);
const OUTPUTS = new Set(["function_call_output", "custom_tool_call_output", "computer_call_output"]);
const CONVERSATIONS = new Set(CONVERSATION_PLACES.map((path) => path.at(-1)));

/**
 * A message: who says it, and its blocks. Each block has a `kind` (text, thinking, call, result, image or
 * other), and the `path` of its value within the message.
 * @returns {{role: string, blocks: Array<Object>, name: string | null} | null} null for what is no message
 */
export function readMessage(value) {
  if (!isObject(value) || folded(value)) return null;
  const [inner, path] = unwrapped(value);
  const read = readPlain(inner);
  if (read === null) return null;
  const blocks = read.blocks.map((block) => ({ ...block, path: [...path, ...block.path] }));
  return { role: read.role, blocks, name: typeof inner.name === "string" ? inner.name : null };
}

/** The message inside an envelope that some frameworks use, and the path to it. */
function unwrapped(value) {
  // LangGraph: the code of a type, and the parts of its object: module, name, fields, method.
  if ("$$ext" in value && Array.isArray(value.of) && isObject(value.of[2])) return [value.of[2], ["of", 2]];
  // pydantic-ai's conversations and Claude's transcripts: an entry with an id, and the message in it.
  const { message } = value;
  if (isObject(message) && !folded(message) && (Array.isArray(message.parts) || typeof message.role === "string")) return [message, ["message"]];
  return [value, []];
}

function readPlain(value) {
  if (typeof value.role === "string") return { role: ROLES.get(value.role) ?? value.role, blocks: chatBlocks(value) };
  if (Array.isArray(value.parts) && (value.kind === "request" || value.kind === "response")) return pydanticMessage(value);
  if (typeof value.type !== "string") return null;
  if (CALLS.has(value.type)) return { role: "assistant", blocks: [callBlock(value.call_id ?? value.id, value.name ?? value.type, value.arguments ?? value.input ?? value.action, [])] };
  if (OUTPUTS.has(value.type)) return { role: "tool", blocks: [resultBlock(value.call_id, value.output, ["output"])] };
  if (value.type === "reasoning") return { role: "assistant", blocks: reasoningBlocks(value) };
  if (["human", "ai", "system", "tool"].includes(value.type) && "content" in value) return { role: ROLES.get(value.type) ?? value.type, blocks: chatBlocks(value) };
  return null;
}

/** The list, the message and the part of it that a path leads to; null outside a conversation. */
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
  // LangChain lists a call of Anthropic's twice: in the content, and here.
  const said = new Set(blocks.filter((block) => block.kind === "call").map((block) => block.id));
  for (const [n, call] of (Array.isArray(value.tool_calls) ? value.tool_calls : []).entries()) {
    const block = chatCall(call, ["tool_calls", n]);
    if (block.kind !== "call" || block.id === null || !said.has(block.id)) blocks.push(block);
  }
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
  if (typeof part.type !== "string") return bedrockBlock(part, path);
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

/** Parts of messages of Strands and Bedrock. The only key of a part is its kind. */
function bedrockBlock(part, path) {
  const { toolUse, toolResult, reasoningContent, image } = part;
  if (typeof part.text === "string" || folded(part.text)) return { kind: "text", text: part.text, path: [...path, "text"] };
  if (isObject(toolUse)) return callBlock(toolUse.toolUseId, toolUse.name, toolUse.input, [...path, "toolUse", "input"]);
  if (isObject(toolResult)) return resultBlock(toolResult.toolUseId, toolResult.content, [...path, "toolResult", "content"], toolResult.status === "error");
  if (isObject(reasoningContent?.reasoningText)) return { kind: "thinking", text: reasoningContent.reasoningText.text ?? "", path: [...path, "reasoningContent", "reasoningText", "text"] };
  if (isObject(image?.source)) return dataBlock(image.source.bytes, `image/${image.format}`, [...path, "image", "source", "bytes"]) ?? { kind: "other", value: part, path };
  return "json" in part ? { kind: "other", value: part.json, path: [...path, "json"] } : { kind: "other", value: part, path };
}

/** A request or response of pydantic-ai. Its parts have the roles. */
function pydanticMessage(value) {
  const kinds = new Set(value.parts.map((part) => part?.part_kind));
  const asked = kinds.has("user-prompt") ? "user" : kinds.has("system-prompt") ? "system" : "tool";
  const role = value.kind === "response" ? "assistant" : asked;
  const blocks = value.parts.flatMap((part, n) => pydanticBlocks(part, ["parts", n], role));
  const instructions = value.instructions ? [{ kind: "thinking", title: "Instructions", text: value.instructions, path: ["instructions"] }] : [];
  return { role, blocks: [...instructions, ...blocks] };
}

function pydanticBlocks(part, path, role) {
  if (!isObject(part) || folded(part)) return [{ kind: "other", value: part, path }];
  const content = [...path, "content"];
  switch (part.part_kind) {
    case "text":
      return [{ kind: "text", text: part.content, path: content }];
    case "system-prompt":
      return [role === "system" ? { kind: "text", text: part.content, path: content } : { kind: "thinking", title: "System", text: part.content, path: content }];
    case "user-prompt":
      return Array.isArray(part.content) ? part.content.map((each, n) => pydanticContent(each, [...content, n])) : contentBlocks(part.content, content);
    case "thinking":
      return [{ kind: "thinking", text: part.content, path: content }];
    case "tool-call": case "builtin-tool-call":
      return [callBlock(part.tool_call_id, part.tool_name, part.args, [...path, "args"])];
    case "tool-return": case "builtin-tool-return":
      return [resultBlock(part.tool_call_id, part.content, content, part.outcome === "failed" || part.outcome === "denied")];
    case "retry-prompt":
      return part.tool_name ? [resultBlock(part.tool_call_id, part.content, content, true)] : contentBlocks(part.content, content);
    case "file":
      return [pydanticContent(part.content, content)];
    default:
      return [{ kind: "other", value: part, path }];
  }
}

function pydanticContent(part, path) {
  if (isObject(part) && part.kind === "binary") return dataBlock(part.data, part.media_type, [...path, "data"]) ?? { kind: "other", value: part, path };
  if (isObject(part) && part.kind === "image-url" && typeof part.url === "string") return { kind: "image", src: part.url, path: [...path, "url"] };
  if (isObject(part) && part.kind === "text-content" && typeof part.content === "string") return { kind: "text", text: part.content, path: [...path, "content"] };
  return partBlock(part, path);
}

/** An image whose bytes are in the state: as bytes, as base64, or in Strands' wrapping of it; null for others. */
function dataBlock(data, type, path) {
  if (typeof type !== "string" || !type.startsWith("image/")) return null;
  const [held, where] = isObject(data) && data.__bytes_encoded__ === true ? [data.data, [...path, "data"]] : [data, path];
  const text = tagged(held)?.[0] === "$bytes" ? tagged(held)[1] : held;
  const lead = `data:${type};base64,`;
  if (typeof text === "string") return { kind: "image", src: lead + text.replaceAll("-", "+").replaceAll("_", "/"), path: where };
  return folded(text) ? { kind: "image", lead, path: where, length: folded(text).length } : null;
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
