"use strict";
// What the other scripts share. Data comes from the #data element: distinct lines, and for each stage of each program
// its lines and their threads; a thread is the same number where a line continues one of an earlier stage.

const data = JSON.parse(document.getElementById("data").textContent);
const page = { query: "", hits: new Set(), viewers: [], pictures: [] };
const one = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// Buttons of which one is pressed.
function choices(label, entries, chosen, choose) {
  const group = make("div", { className: "choices", role: "group" });
  group.append(make("span", { className: "quiet" }, label));
  for (const [value, text] of entries) {
    const button = make("button", { type: "button" }, text);
    button.dataset.value = value;
    button.ariaPressed = String(value === chosen);
    button.addEventListener("click", () => {
      press(group, value);
      choose(value);
    });
    group.append(button);
  }
  return group;
}

function press(group, value) {
  for (const button of all("button", group)) button.ariaPressed = String(button.dataset.value === value);
}
