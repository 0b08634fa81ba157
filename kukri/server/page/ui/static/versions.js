// Versions of a turn: what was there before an edit, with all that followed, stays alongside what took its place.
// A message with others in its place has `versions`: {at, tails}, where tails[i] are the messages from there
// on in version i, and null for the version that is shown, `at`.

// Takes the messages from an index on out of the conversation. Returns the versions of what comes instead.
export function begin(messages, index) {
  const tail = messages.splice(index)
  if (!tail.length) return undefined
  const versions = tail[0].versions ?? { at: 0, tails: [null] }
  delete tail[0].versions
  versions.tails[versions.at] = tail
  versions.at = versions.tails.push(null) - 1
  return versions
}

// Drops the version that is shown, which is the last one and has come to nothing: the one before comes back.
export function giveUp(messages, index, versions) {
  versions.tails.pop()
  bring(messages, index, versions, versions.tails.length - 1)
  if (versions.tails.length === 1) delete messages[index].versions
}

// Shows another version of the message at an index, `step` places on.
export function turn(messages, index, step) {
  const versions = messages[index].versions
  const next = versions.at + step
  if (!(next in versions.tails)) return
  const tail = messages.splice(index)
  delete tail[0].versions
  versions.tails[versions.at] = tail
  bring(messages, index, versions, next)
}

function bring(messages, index, versions, at) {
  const tail = versions.tails[at]
  versions.tails[at] = null
  versions.at = at
  tail[0].versions = versions
  messages.splice(index, Infinity, ...tail)
}
