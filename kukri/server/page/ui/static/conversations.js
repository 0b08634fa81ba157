// What this browser remembers: conversations, one entry of localStorage each, and settings.
// A conversation is {id, title, system, changed, messages: [{id, role, content, images?, thoughts?, end?, numbers?,
// versions?}]}. What images name is in images.js. Several tabs may write one conversation.
import { all as everyVersion, merge, withoutLast } from "./versions.js"

const PREFIX = "kukri.chat."

export const newId = () => crypto.getRandomValues(new Uint32Array(2)).join("-")

export const create = () => ({
  id: newId(),
  title: "",
  system: "",
  changed: 0,
  messages: [],
})

// Every conversation, the latest first. What is not one is left alone.
export function all() {
  return Object.keys(localStorage)
    .filter((name) => name.startsWith(PREFIX))
    .map(readChat)
    .filter(Boolean)
    .sort((a, b) => b.changed - a.changed)
}

function readChat(name) {
  const entry = read(name)
  return entry && typeof entry.id === "string" && Array.isArray(entry.messages) ? entry : null
}

// Writes a conversation together with what other tabs have written of it. `changes` are other fields than its
// messages that change; `live` is an answer that is not over, which is left out. Returns whether messages of other
// tabs came. Throws where the browser's storage is full.
export function save(conversation, changes = {}, live = null) {
  const stored = readChat(PREFIX + conversation.id)
  const hasMore = !!stored && lacks(conversation, stored)
  if (stored) {
    conversation.title = stored.title || conversation.title
    conversation.system = stored.system
    conversation.messages = merge(conversation.messages, stored.messages)
  }
  const { messages, system } = Object.assign(conversation, changes)
  if (!messages.length && !system) return false
  const kept = live && messages.at(-1) === live ? withoutLast(messages) : messages
  write(PREFIX + conversation.id, { ...conversation, messages: kept, changed: Date.now() })
  return hasMore
}

// Brings a conversation to what another tab has written of it. Returns whether messages of this tab are not written.
export function follow(conversation) {
  const { title, system, messages } = readChat(PREFIX + conversation.id)
  const isAhead = lacks({ messages }, conversation)
  Object.assign(conversation, { title, system, messages: merge(messages, conversation.messages) })
  return isAhead
}

function lacks(conversation, other) {
  const known = new Set(everyVersion(conversation.messages).map(({ id }) => id))
  return everyVersion(other.messages).some(({ id }) => !known.has(id))
}

export const isEntryOf = (name, { id }) => name === PREFIX + id

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
