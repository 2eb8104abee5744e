// The only place where elements are made. Text becomes text nodes, never markup.

const SVG_NAMESPACE = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "disabled", "checked", "hidden", "open", "selected", "readOnly"]);

/**
 * An element. Attributes that begin with "on" are listeners; null, undefined and false leave one out.
 * @param {string} tag
 * @param {Object<string, any>} [attributes]
 * @param {...any} children nodes, text, lists of both; null and false are left out
 */
export function el(tag, attributes, ...children) {
  return furnish(document.createElement(tag), attributes, children);
}

/** The same within an SVG. */
export function svg(tag, attributes, ...children) {
  return furnish(document.createElementNS(SVG_NAMESPACE, tag), attributes, children);
}

/** Replace the content of a node. */
export function put(node, ...children) {
  node.replaceChildren(...flat(children));
  return node;
}

/** A link to the web, or plain text where the address is no http(s). */
export function webLink(address, ...children) {
  return /^https?:\/\//i.test(address)
    ? el("a", { href: address, rel: "noopener noreferrer", target: "_blank" }, ...children)
    : el("span", { title: address }, ...children);
}

/** An image that lies in the page's own data; nothing is fetched. */
export function dataImage(address, alt) {
  return /^data:image\/(png|jpe?g|gif|webp);base64,[a-z0-9+/=\s]*$/i.test(address)
    ? el("img", { src: address, alt, loading: "lazy" })
    : null;
}

function furnish(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) {
      if (typeof value !== "function") throw new TypeError(`${name} must be a function`);
      node.addEventListener(name.slice(2), value);
    } else if (PROPERTIES.has(name)) {
      node[name] = value;
    } else if (name === "style" || name === "srcdoc") {
      throw new TypeError(`${name} is not set here`);
    } else {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  node.append(...flat(children));
  return node;
}

function flat(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}
