// The settings form: kept between visits, read into the fields of a request.
// A field that is wrong is an error that names the field; nothing wrong is sent and nothing is left out in silence.

const form = one("#form");
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const FORMATS = {
  none: null,
  json_object: null,
  json_schema: { label: "JSON schema", hint: '{"type": "object", "properties": {"name": {"type": "string"}}}' },
  regex: { label: "Regular expression", hint: "[0-9]{4}-[0-9]{2}-[0-9]{2}" },
  choice: { label: "Choices, one a line", hint: "yes\nno" },
  grammar: { label: "Grammar", hint: 'start: "yes" | "no"' },
};

class SettingError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

// ---- reading ------------------------------------------------------------------------------------

// The fields of a request that the form decides. Throws a SettingError.
function readRequestFields() {
  return { ...readSampling(), ...readFormat(), ...readTools() };
}

function readSampling() {
  const fields = {};
  for (const name of NUMBERS) {
    const input = form.elements[name];
    if (!input.validity.valid) throw new SettingError(name, `${name}: ${input.validationMessage}`);
    if (input.value !== "") fields[name === "max_tokens" ? "max_completion_tokens" : name] = Number(input.value);
  }
  const stop = readLines("stop").map(unescapeLine);
  if (stop.length) fields.stop = stop;
  if (form.elements.logprobs.checked) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
  return fields;
}

function readLines(name) {
  return form.elements[name].value.split("\n").filter((line) => line !== "");
}

function unescapeLine(line) {
  const blanks = { n: "\n", t: "\t", r: "\r", "\\": "\\" };
  return line.replace(/\\([ntr\\])/g, (match, letter) => blanks[letter]);
}

function readFormat() {
  const kind = form.elements.format.value;
  const source = form.elements.format_source.value;
  if (kind === "none") return {};
  if (kind === "json_object") return { response_format: { type: "json_object" } };
  if (!source.trim()) throw new SettingError("format_source", `${FORMATS[kind].label}: nothing entered`);
  if (kind === "json_schema") return { response_format: { type: "json_schema", json_schema: readSchema() } };
  if (kind === "choice") return { structured_outputs: { choice: readLines("format_source") } };
  return { structured_outputs: { [kind]: source } };
}

// A schema alone, or with its name: {"name": …, "schema": …}.
function readSchema() {
  const schema = parseJson("format_source", "JSON schema");
  if (typeof schema === "boolean") return { name: "answer", schema, strict: true };
  if (typeof schema !== "object" || schema === null || Array.isArray(schema)) {
    throw new SettingError("format_source", "JSON schema: must be an object, such as " + FORMATS.json_schema.hint);
  }
  const isNamed = typeof schema.name === "string" && typeof schema.schema === "object";
  return isNamed ? schema : { name: "answer", schema, strict: true };
}

function readTools() {
  if (!form.elements.tools.value.trim()) return {};
  const tools = parseJson("tools", "Tools");
  if (!Array.isArray(tools)) throw new SettingError("tools", 'Tools: must be a list, such as [{"type": "function", …}]');
  return tools.length ? { tools } : {};
}

function parseJson(name, label) {
  try {
    return JSON.parse(form.elements[name].value);
  } catch (error) {
    throw new SettingError(name, `${label}: not JSON: ${error.message}`);
  }
}

// ---- keeping ------------------------------------------------------------------------------------

const KEPT = ["system", ...NUMBERS, "stop", "logprobs", "format", "format_source", "tools"];
const apiKey = () => form.elements.api_key.value.trim();

function saveSettings() {
  const values = KEPT.map((name) => {
    const field = form.elements[name];
    return [name, field.type === "checkbox" ? field.checked : field.value];
  });
  save("settings", Object.fromEntries(values));
  save("api-key", apiKey(), () => sessionStorage);
}

function loadSettings() {
  const values = load("settings") ?? {};
  for (const name of KEPT) {
    const field = form.elements[name];
    if (field.type === "checkbox") field.checked = values[name] ?? field.checked;
    else if (typeof values[name] === "string") field.value = values[name];
  }
  if (!(form.elements.format.value in FORMATS)) form.elements.format.value = "none";
  form.elements.api_key.value = load("api-key", () => sessionStorage) ?? "";
  showFormatField();
}

function showFormatField() {
  const format = FORMATS[form.elements.format.value];
  one("#format-field").hidden = !format;
  if (!format) return;
  one("#format-name").textContent = format.label;
  form.elements.format_source.placeholder = format.hint;
}

// ---- showing ------------------------------------------------------------------------------------

const settingsToggle = one("#settings-toggle");

function openSettings(open, field = null) {
  one("#settings").hidden = !open;
  settingsToggle.ariaExpanded = String(open);
  if (field) form.elements[field].focus();
}

settingsToggle.addEventListener("click", () => openSettings(one("#settings").hidden));
form.addEventListener("input", saveSettings);
form.elements.format.addEventListener("change", showFormatField);
form.addEventListener("submit", (event) => event.preventDefault());
