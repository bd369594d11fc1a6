// The browser's storage, which may be forbidden or full; the page works without.

export function keep(storage, name, value) {
  try {
    storage().setItem(name, value);
    return true;
  } catch {
    return false;
  }
}

export function recall(storage, name) {
  try {
    return storage().getItem(name);
  } catch {
    return null;
  }
}

export function forget(storage, name) {
  try {
    storage().removeItem(name);
  } catch {
    return;
  }
}

/** All stored names that begin with `prefix`. */
export function names(storage, prefix) {
  try {
    return Object.keys(storage()).filter((name) => name.startsWith(prefix));
  } catch {
    return [];
  }
}

// Functions, because reading the property itself fails where storage is forbidden.
export const local = () => localStorage;
export const session = () => sessionStorage;
