// Feeds one trace to Perfetto's own trace processor (WebAssembly) and answers SQL about what it has imported.
//
//   node perfetto_importer.cjs FOLDER TRACE SQL...   ->   a JSON list: for each SQL its rows, or {"error": text}
//
// FOLDER holds engine_bundle.js and trace_processor.wasm of a release of Perfetto's viewer.
"use strict";
const fs = require("node:fs");
const path = require("node:path");
const vm = require("node:vm");

const [folder, trace, ...queries] = process.argv.slice(2);
// Methods of TraceProcessorRpc (protos/perfetto/trace_processor/trace_processor.proto).
const APPEND = 1, FINALIZE = 2, QUERY = 3;
const PIECE = 1 << 20;

// The viewer runs it in a worker of a page: this is all that it finds there.
const port = { postMessage: (bytes) => take(Buffer.from(bytes)) };
const say = (...words) => process.stderr.write(words.join(" ") + "\n");
const page = vm.createContext({
  WorkerGlobalScope() {},
  XMLHttpRequest: class {
    open(_method, url) { this.url = url; }
    send() { this.response = new Uint8Array(fs.readFileSync(path.join(folder, path.basename(this.url)))).buffer; }
  },
  location: { href: "http://viewer/engine_bundle.js" }, console: { log: say, warn: say, error: say, info: say },
  URL, TextDecoder, TextEncoder, setTimeout, clearTimeout, performance, crypto: globalThis.crypto,
});
page.self = page;

function varint(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return Buffer.from([...bytes, value]);
}
function field(number, payload) {
  return typeof payload === "number"
    ? Buffer.concat([varint(number * 8), varint(payload)])
    : Buffer.concat([varint(number * 8 + 2), varint(payload.length), payload]);
}
// [[number, value]]: a number, or the bytes of whatever has a length.
function fields(bytes) {
  const found = [];
  let at = 0;
  const number = () => {
    let value = 0n, shift = 0n, byte;
    do { byte = bytes[at++]; value |= BigInt(byte & 127) << shift; shift += 7n; } while (byte & 128);
    return Number(BigInt.asIntN(64, value));
  };
  while (at < bytes.length) {
    const tag = number(), kind = tag & 7;
    if (kind === 0) found.push([tag >>> 3, number()]);
    else {
      const length = kind === 1 ? 8 : kind === 5 ? 4 : number();
      found.push([tag >>> 3, bytes.subarray(at, at += length)]);
    }
  }
  return found;
}
function varints(bytes) {
  // As fields of one number each, for want of tags.
  const found = [];
  for (let at = 0; at < bytes.length;) {
    let end = at;
    while (bytes[end] & 128) end++;
    found.push(fields(Buffer.concat([Buffer.from([8]), bytes.subarray(at, ++end)]))[0][1]);
    at = end;
  }
  return found;
}

let reply = Buffer.alloc(0), waiting = null, sequence = 0;
function take(piece) {
  reply = Buffer.concat([reply, piece]);
  for (;;) {
    // A stream of `repeated TraceProcessorRpc msg = 1`.
    let at = 1, length = 0, factor = 1;
    while (at < reply.length && reply[at] & 128) { length += (reply[at++] & 127) * factor; factor *= 128; }
    if (at >= reply.length) return;
    length += reply[at++] * factor;
    if (reply.length < at + length) return;
    const message = reply.subarray(at, at + length);
    reply = reply.subarray(at + length);
    waiting(fields(message));
  }
}
function call(method, ...parts) {
  const message = Buffer.concat([field(1, ++sequence), field(2, method), ...parts]);
  return new Promise((resolve, reject) => {
    const answers = [];
    waiting = (answer) => {
      const fatal = answer.find(([number]) => number === 5);
      if (fatal) reject(new Error(fatal[1].toString()));
      answers.push(answer);
      const results = answer.filter(([number]) => number === 203).map(([, value]) => fields(value));
      const more = method === QUERY && !results.some(isLast);
      if (!more) resolve(answers);
    };
    port.onmessage({ data: page.Bytes.from(field(1, message)) });
  });
}
function isLast(result) {
  return result.some(([number, value]) =>
    (number === 2 && value.length) || (number === 3 && fields(value).some(([n, v]) => n === 6 && v)));
}
function rows(answers) {
  const names = [], kinds = [], ints = [], floats = [], strings = [];
  for (const [number, result] of answers.flat()) {
    if (number !== 203) continue;
    for (const [part, value] of fields(result)) {
      if (part === 1) names.push(value.toString());
      if (part === 2 && value.length) return { error: value.toString() };
      if (part !== 3) continue;
      for (const [cell, bytes] of fields(value)) {
        if (cell === 1) kinds.push(...varints(bytes));
        if (cell === 2) ints.push(...varints(bytes));
        if (cell === 3) for (let at = 0; at < bytes.length; at += 8) floats.push(bytes.readDoubleLE(at));
        if (cell === 5) strings.push(...bytes.toString().split("\0").slice(0, -1));
      }
    }
  }
  // Kinds of cells: 1 null, 2 integer, 3 float, 4 string.
  const cells = kinds.map((kind) => kind === 2 ? ints.shift() : kind === 3 ? floats.shift() : kind === 4 ? strings.shift() : null);
  const table = [];
  while (cells.length) table.push(Object.fromEntries(cells.splice(0, names.length).map((cell, at) => [names[at], cell])));
  return table;
}

async function main() {
  vm.runInContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8") + ";self.Bytes = Uint8Array;", page);
  page.onmessage({ data: port });
  // It sets itself up in promises of its own, and tells nobody.
  await new Promise((resolve) => setTimeout(resolve, 0));
  const data = fs.readFileSync(trace);
  for (let at = 0; at < data.length; at += PIECE) await call(APPEND, field(101, data.subarray(at, at + PIECE)));
  await call(FINALIZE);
  const found = [];
  for (const query of queries) found.push(rows(await call(QUERY, field(103, field(1, Buffer.from(query))))));
  fs.writeSync(1, JSON.stringify(found));
  process.exit(0);
}
main().catch((error) => { process.stderr.write(String(error.stack || error) + "\n"); process.exit(1); });
