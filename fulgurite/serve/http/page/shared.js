"use strict";
// What the other scripts share: elements, numbers as text, storage.
// Text of the model becomes text nodes only (`make` appends strings as text).

const one = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function makeButton(text, onClick, className = "link") {
  const button = make("button", { type: "button", className }, text);
  button.addEventListener("click", onClick);
  return button;
}

// ---- numbers as text ----------------------------------------------------------------------------

const formatCount = (count) => count.toLocaleString("en-US");

function formatTokens(count) {
  return `${formatCount(count)} token${count === 1 ? "" : "s"}`;
}

function formatSeconds(seconds) {
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  return `${seconds.toFixed(seconds < 99.95 ? 1 : 0)} s`;
}

function formatRate(rate) {
  return rate < 99.95 ? rate.toFixed(1) : formatCount(Math.round(rate));
}

function formatPercent(probability) {
  const percent = 100 * probability;
  if (percent < 0.01) return "<0.01%";
  return `${percent.toFixed(percent < 1 ? 2 : 1)}%`;
}

// ---- storage: a browser may refuse it, and it may be full ---------------------------------------

function load(key, storage = () => localStorage) {
  try {
    return JSON.parse(storage().getItem(`fulgurite-${key}`));
  } catch (error) {
    return null;
  }
}

function save(key, value, storage = () => localStorage) {
  try {
    storage().setItem(`fulgurite-${key}`, JSON.stringify(value));
    return true;
  } catch (error) {
    return false;
  }
}
