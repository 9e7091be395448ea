/** Tabs with code that can be copied. */

/** @typedef {import("./snippets.js").Snippet} Snippet */

/** Shows one of several programs. Arrow keys move between the tabs. */
export class Tabs {
  #list = document.createElement("div");
  #panel = document.createElement("div");
  #code = document.createElement("code");
  #copy = document.createElement("button");
  /** @type {Snippet[]} */
  #snippets = [];
  #selected = 0;

  /**
   * @param {HTMLElement} container
   * @param {string} label
   */
  constructor(container, label) {
    this.#list.setAttribute("role", "tablist");
    this.#list.setAttribute("aria-label", label);
    this.#list.addEventListener("keydown", (event) => this.#move(event));
    this.#panel.setAttribute("role", "tabpanel");
    this.#panel.id = `${container.id}-panel`;
    const text = document.createElement("pre");
    text.tabIndex = 0; // so that keys scroll it
    text.append(this.#code);
    this.#copy.type = "button";
    this.#copy.addEventListener("click", () => this.#copyCode());
    const announcement = document.createElement("span");
    announcement.setAttribute("role", "status");
    announcement.className = "visually-hidden";
    this.#panel.append(text, this.#copy, announcement);
    this.announcement = announcement;
    container.append(this.#list, this.#panel);
  }

  /**
   * Shows programs; the selected one keeps its place.
   * @param {Snippet[]} snippets
   */
  show(snippets) {
    this.#snippets = snippets;
    if (this.#list.childElementCount !== snippets.length)
      this.#list.replaceChildren(...snippets.map(({ name }, index) => this.#makeTab(name, index)));
    this.#select(this.#selected);
  }

  /**
   * @param {string} name
   * @param {number} index
   */
  #makeTab(name, index) {
    const tab = document.createElement("button");
    tab.type = "button";
    tab.id = `${this.#panel.id}-tab-${index}`;
    tab.textContent = name;
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", this.#panel.id);
    tab.addEventListener("click", () => this.#select(index));
    return tab;
  }

  /** @param {number} index */
  #select(index) {
    this.#selected = index;
    [...this.#list.children].forEach((tab, each) => {
      tab.setAttribute("aria-selected", String(each === index));
      /** @type {HTMLElement} */ (tab).tabIndex = each === index ? 0 : -1;
    });
    this.#panel.setAttribute("aria-labelledby", `${this.#panel.id}-tab-${index}`);
    this.#code.textContent = this.#snippets[index].code;
    this.#copy.textContent = "Copy";
    this.announcement.textContent = "";
  }

  /** @param {KeyboardEvent} event */
  #move(event) {
    const count = this.#snippets.length;
    const targets = {
      ArrowRight: this.#selected + 1,
      ArrowLeft: this.#selected + count - 1,
      Home: 0,
      End: count - 1,
    };
    if (!(event.key in targets)) return;
    event.preventDefault();
    this.#select(targets[/** @type {keyof targets} */ (event.key)] % count);
    /** @type {HTMLElement} */ (this.#list.children[this.#selected]).focus();
  }

  async #copyCode() {
    const { code } = this.#snippets[this.#selected];
    try {
      await navigator.clipboard.writeText(code);
      this.#copy.textContent = "Copied";
      this.announcement.textContent = "Copied to the clipboard.";
    } catch {
      getSelection()?.selectAllChildren(this.#code); // browsers allow only secure pages to copy
      this.#copy.textContent = "Press Ctrl C";
      this.announcement.textContent = "The program is selected; copy it with Control and C.";
    }
  }
}
