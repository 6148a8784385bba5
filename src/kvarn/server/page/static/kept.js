// Short texts that outlive a reload. A browser may refuse to keep anything, or have no room: then they last as long as the page.
class Kept {
  constructor(storage) {
    this.storage = storage; // a function: to name a storage that is blocked is an error already
    this.refused = new Map();
  }

  get(name) {
    if (this.refused.has(name)) return this.refused.get(name);
    try {
      return this.storage().getItem(name);
    } catch {
      return null;
    }
  }

  // The value of a JSON text; of another text, an empty object.
  object(name) {
    try {
      const value = JSON.parse(this.get(name));
      return typeof value === "object" && value !== null ? value : {};
    } catch {
      return {};
    }
  }

  // null: forget it.
  set(name, text) {
    this.refused.delete(name);
    try {
      if (text === null) this.storage().removeItem(name);
      else this.storage().setItem(name, text);
    } catch {
      this.refused.set(name, text);
    }
  }
}

export const ofTab = new Kept(() => sessionStorage);
export const ofBrowser = new Kept(() => localStorage);
