// What this browser remembers: conversations, one entry of localStorage each, and settings.
// A conversation is {id, title, system, changed, messages: [{role, content, images?, thoughts?, end?, numbers?,
// versions?}]}. What images name is in images.js.

const PREFIX = "kukri.chat."

export const create = () => ({
  id: crypto.getRandomValues(new Uint32Array(2)).join("-"),
  title: "",
  system: "",
  changed: 0,
  messages: [],
})

// Every conversation, the latest first. What is not one is left alone.
export function all() {
  return Object.keys(localStorage)
    .filter((name) => name.startsWith(PREFIX))
    .map(read)
    .filter((entry) => entry && typeof entry.id === "string" && Array.isArray(entry.messages))
    .sort((a, b) => b.changed - a.changed)
}

// Throws where the browser's storage is full.
export function save(conversation) {
  if (!conversation.messages.length && !conversation.system) return
  write(PREFIX + conversation.id, { ...conversation, changed: Date.now() })
}

export const remove = (id) => localStorage.removeItem(PREFIX + id)

// Tokens and their probabilities would fill it soon.
const isKept = (name, value) => (name === "tokens" || name === "isFormatted" ? undefined : value)

export const write = (name, value) => localStorage.setItem(name, JSON.stringify(value, isKept))

export function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name))
  } catch {
    return null
  }
}
