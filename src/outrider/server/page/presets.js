// Examples whose answers are easy to draft, in different ways.

import { make } from "./draw.js";

const CODE = `def count_words(text, shortest=1):
    counts = {}
    for word in text.lower().split():
        word = word.strip(".,;:!?")
        if len(word) >= shortest:
            counts[word] = counts.get(word, 0) + 1
    ordered = sorted(counts.items(), key=lambda pair: -pair[1])
    return ordered[: len(text)]
`;

const LIST = `1. Mercury, 57.9 million km, 88 days
2. Venus, 108.2 million km, 225 days
3. Earth, 149.6 million km, 365 days
4. Mars, 227.9 million km, 687 days
5. Jupiter, 778.6 million km, 4331 days
6. Saturn, 1433.5 million km, 10747 days
7. Uranus, 2872.5 million km, 30589 days
8. Neptune, 4495.1 million km, 59800 days`;

const SCHEMA = {
  type: "object",
  properties: {
    people: {
      type: "array",
      minItems: 4,
      maxItems: 4,
      items: {
        type: "object",
        properties: {
          name: { type: "string", maxLength: 24 },
          profession: { type: "string", maxLength: 24 },
          age: { type: "integer", minimum: 18, maximum: 90 },
          city: { type: "string", maxLength: 24 },
        },
        required: ["name", "profession", "age", "city"],
        additionalProperties: false,
      },
    },
  },
  required: ["people"],
  additionalProperties: false,
};

/** The edit that the race begins with: its answer mostly repeats the prompt. */
export const EDIT = `Rename the parameter \`text\` to \`message\` in this function and return the whole function:
\`\`\`python
${CODE}\`\`\``;

/** `fields`: values of settings that the example needs; the others of this kind are emptied. */
export const PRESETS = [
  { name: "Edit this code", prompt: EDIT, fields: {} },
  { name: "Edit with a prediction", prompt: EDIT, fields: { prediction: `\`\`\`python\n${CODE}\`\`\`` } },
  { name: "Repeat a list", prompt: `Repeat this list exactly, line by line:\n\n${LIST}`, fields: {} },
  {
    name: "JSON",
    prompt: "Invent four people who live in different cities.",
    fields: { format: "schema", schema: JSON.stringify(SCHEMA, null, 2) },
  },
  { name: "Free text", prompt: "Explain in a few sentences how a bicycle stays upright.", fields: {} },
];

/** Draw a button for each example; `onChoose(preset)` is called with the selected one. */
export function drawPresets(into, onChoose) {
  const buttons = PRESETS.map((preset) => {
    const button = make("button", { type: "button", class: "chip-button" }, preset.name);
    button.addEventListener("click", () => onChoose(preset));
    return button;
  });
  into.replaceChildren(...buttons);
}
