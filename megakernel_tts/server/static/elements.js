/** Elements of the document. */

/**
 * Gives the element with an id.
 * @template {Element} T
 * @param {string} id
 * @param {new () => T} type
 * @returns {T}
 */
export function find(id, type) {
  const element = document.getElementById(id);
  if (!(element instanceof type)) throw new TypeError(`There is no ${type.name} #${id}.`);
  return element;
}

/**
 * Sets the text of an element, if it differs: live regions announce every change.
 * @param {Element} element
 * @param {string} text
 */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Fills a list of choices and keeps the selected one, if it is still there.
 * @param {HTMLSelectElement} select
 * @param {[string, string][]} choices Values and labels.
 */
export function setChoices(select, choices) {
  const before = select.value;
  select.replaceChildren(...choices.map(([value, label]) => new Option(label, value)));
  if (choices.some(([value]) => value === before)) select.value = before;
}
