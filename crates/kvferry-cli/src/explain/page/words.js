// The data, and words and colours for it.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0, value = count;
  while (value >= 1023.95 && unit + 1 < units.length) { value /= 1024; unit += 1; }
  return unit === 0 ? `${count} B` : `${value.toFixed(1)} ${units[unit]}`;
}
const number = (count) => String(count).replace(/\B(?=(\d{3})+$)/g, "\u202f");
const many = (count, word, plural) =>
  `${number(count)} ${count === 1 ? word : plural || word + "s"}`;

// States that are known by name have a colour and a meaning; any other gets a colour in its turn.
const COLOURS = {
  k: "--c-k", v: "--c-v", latent: "--c-latent", indexer: "--c-indexer", ssm: "--c-ssm",
  "conv.x": "--c-conv1", "conv.q": "--c-conv1", "conv.b": "--c-conv2", "conv.k": "--c-conv2",
  "conv.c": "--c-conv3", "conv.v": "--c-conv3", "spare columns": "--c-spare",
};
const OTHER_COLOURS = ["--c-latent", "--c-conv1", "--c-v", "--c-indexer", "--c-ssm", "--c-conv3", "--c-k"];
const MEANINGS = {
  k: "keys", v: "values", latent: "latents", indexer: "indexer keys", ssm: "recurrent state",
  "conv.x": "convolution input x", "conv.b": "convolution input B", "conv.c": "convolution input C",
  "conv.q": "convolution input q", "conv.k": "convolution input k", "conv.v": "convolution input v",
  "spare columns": "columns for speculative tokens (not moved)",
};
const tail = (name) => name.slice(name.lastIndexOf("/") + 1);
const meaning = (name) => MEANINGS[tail(name)] ? `${tail(name)}: ${MEANINGS[tail(name)]}` : tail(name);
const others = [];
function colour(name) {
  const known = COLOURS[tail(name)];
  if (known) return `var(${known})`;
  if (!others.includes(tail(name))) others.push(tail(name));
  return `var(${OTHER_COLOURS[others.indexOf(tail(name)) % OTHER_COLOURS.length]})`;
}

function make(parent, tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}
function html(parent, tag, attributes, text) {
  const node = document.createElement(tag);
  for (const key in attributes || {}) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}
function hatch(svg, id) {
  const defs = make(svg, "defs", {});
  const pattern = make(defs, "pattern", { id, width: 7, height: 7, patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)" });
  make(pattern, "rect", { width: 7, height: 7, fill: "var(--pad)" });
  make(pattern, "line", { x1: 0, y1: 0, x2: 0, y2: 7, stroke: "var(--pad-line)", "stroke-width": 2 });
}

