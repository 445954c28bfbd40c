"use strict";
// What the package computes, in a browser: vram_guard/timeline, vram_guard/scratch and vram_guard/allocator with
// PyTorch's defaults and no limit. Numbers are bytes, whole, and below 2^53.

const MIB = 2 ** 20;
const up = (number, unit) => Math.ceil(number / unit) * unit;
const ceil = (number, divisor) => Math.ceil(number / divisor);
const product = (numbers) => numbers.reduce((one, other) => one * other, 1);

/** What the tables hold and this script does not know: no answer. */
class Unknown extends Error {}

// --- temporaries of kernels (vram_guard/scratch) ---------------------------------------------------------------------

const TILES = [[90, 384, 17, 24], [80, 384, 17, 21], [70, 256, 46, 23], [61, 256, 30, 30], [0, 256, 29, 29]];

function tile(threads, items, width) {
  const scaled = Math.max(1, Math.floor(items * 4 / Math.max(4, width)));
  return Math.min(threads, up(Math.floor(48 * 1024 / (width * scaled)), 32)) * scaled;
}

function bits(number) {
  let count = 0;
  for (; number >= 1; number = Math.floor(number / 2)) count++;
  return count;
}

function reduction(rule, numbers, card) {
  const count = Math.floor(numbers.length / 2), sizes = numbers.slice(1, 1 + count), strides = numbers.slice(1 + count);
  if (!count || sizes.includes(0)) return 0;
  const outputs = product(sizes.slice(rule.reduced)), largest = 2 ** 31 - 1;
  const lastByte = () => 1 + rule.element * sizes.reduce((sum, size, i) => sum + (size - 1) * strides[i], 0);
  let halved = false;
  while (product(sizes) > largest || lastByte() > largest) {
    const extents = sizes.map((size, i) => (size - 1) * Math.abs(strides[i]));
    const at = extents.lastIndexOf(Math.max(...extents));
    sizes[at] -= Math.floor(sizes[at] / 2);
    halved = true;
  }
  if (rule.part === "accumulator") return halved ? outputs * rule.accumulated : 0;
  return spread(rule, numbers[0], sizes, strides, card);
}

function spread(rule, offset, sizes, strides, card) {
  const outputs = product(sizes.slice(rule.reduced)), inputs = product(sizes.slice(0, rule.reduced));
  const inner = rule.reduced === sizes.length || (rule.reduced > 0 && strides[0] < strides[rule.reduced]);
  const fastest = inner ? strides[0] : strides[rule.reduced];
  let [wide, high] = inner ? [inputs, outputs] : [outputs, inputs], atOnce = 1;
  if (fastest === 1 && !inner) {
    const all = [offset, sizes[rule.reduced], ...strides.filter((_, i) => i !== rule.reduced)];
    atOnce = [4, 2, 1].find((each) => all.every((number) => number % each === 0));
    wide = Math.floor(wide / atOnce);
  }
  const most = Math.floor((rule.element === 16 ? 256 : 512) / atOnce);
  const [width, height] = [wide, high].map((size) => 2 ** (bits(Math.max(Math.min(size, most), 1)) - 1));
  const blockHeight = Math.min(height, Math.floor(most / Math.min(width, 32)));
  const blockWidth = Math.min(width, Math.floor(most / blockHeight));
  let values = inner ? ceil(inputs, blockWidth) : inputs;
  if (values < Math.min(blockHeight * 16, 256)) return 0;
  values = ceil(values, blockHeight);
  const grid = ceil(Math.floor(outputs / atOnce), inner ? 1 : blockWidth);
  const target = card.processors * Math.floor(card.threads / (blockWidth * blockHeight));
  if (values < 256 || grid > target) return 0;
  const blocks = Math.max(Math.min(ceil(target, grid), ceil(values, 16)), ceil(values, 256));
  if (blocks <= 1) return 0;
  if (rule.part === "semaphores") return 4 * grid;
  return rule.accumulated * outputs * blocks * (inner ? 1 : blockWidth * atOnce);
}

const RULES = {
  Reduction: reduction,
  RadixSort(rule, [count, keys], card) {
    if (count <= rule.above) return 0;
    if (count <= tile(256, 19, rule.width)) return 1;
    const [, threads, four, eight] = TILES.find(([since]) => card.capability >= since);
    const each = tile(threads, rule.width === 4 ? four : eight, rule.width);
    const passes = ceil(rule.whole ? 8 * rule.width : bits(Math.max(keys - 1, 1)), 8);
    const portion = Math.floor((2 ** 28 - 1) / each) * each, portions = ceil(count, portion);
    const spare = passes <= 1 ? 0 : count * rule.width;
    const parts = [
      portions * passes * 2048, ceil(Math.min(count, portion), each) * 1024, spare, spare, portions * passes * 4,
    ];
    return parts.reduce((sum, size) => sum + up(size, 256), 255);
  },
  EmbeddingGradient(rule, [count], card) {
    if (count <= rule.above) return 0;
    const segments = Math.min(count, rule.rows), pieces = Math.floor(count / 10) + segments;
    if (["sums", "places", "table"].includes(rule.part)) {
      const warped = up(rule.stride, 32), blocks = ceil(segments * warped, Math.min(warped, 1024));
      const inPlace = rule.stride > 0 && blocks < card.processors * 4 && pieces > blocks * 4;
      if (inPlace === (rule.part === "sums")) return 0;
    }
    return ({ indices: count, segments, table: rule.rows }[rule.part] ?? pieces) * rule.width;
  },
  PartialGradient(rule, [rows], card) {
    if (rows <= 65536 || Math.floor(rule.columns / 32) >= Math.floor(card.processors / 2)) return 0;
    const blocks = Math.min(Math.floor(32768 / ceil(rule.columns, 32)), ceil(rows, 32));
    if (rule.part === "rows") return blocks * rule.columns * rule.element;
    if (rule.part === "result") return rule.columns * rule.element;
    return reduction({ ...rule, reduced: 1 }, [0, blocks, rule.columns, rule.columns, 1], card);
  },
};

// --- the allocator (vram_guard/allocator) ----------------------------------------------------------------------------

const BASE = 0x7f0000000000, STRETCH = 32 * MIB, HELD_ABOVE = 12 * STRETCH;

/** Addresses of new segments. */
class Driver {
  constructor(placement) {
    this.placement = placement;
    this.reserved = 0; // nothing is given back, so that this is its peak too
    this.lowest = this.highest = this.letGo = BASE;
    this.left = [];
  }

  take(size) {
    this.reserved += size;
    if (this.placement === "above") return (this.highest += size) - size;
    let at = this.left.findLastIndex(([address, end]) => end - address >= size);
    if (at < 0) {
      const whole = up(size, STRETCH), within = this.letGo - whole >= BASE;
      const end = within ? this.letGo : this.lowest;
      if (within) this.letGo = end - whole;
      else this.lowest = end - whole;
      at = this.left.push([end - whole, end]) - 1;
    }
    const [address, end] = this.left[at];
    if (address + size < end) this.left[at][0] = address + size;
    else this.left.splice(at, 1);
    return address;
  }
}

/** Where a free block of this size and address is, or would be, in a pool that is sorted by both. */
function place(pool, size, address) {
  let low = 0, high = pool.length;
  while (low < high) {
    const middle = (low + high) >>> 1, block = pool[middle];
    if (block.size < size || (block.size === size && block.address < address)) low = middle + 1;
    else high = middle;
  }
  return low;
}

const add = (pool, block) => pool.splice(place(pool, block.size, block.address), 0, block);
const remove = (pool, block) => pool.splice(place(pool, block.size, block.address), 1);

/** The peaks of a sequence: of events 0 allocates the next block, and n frees the n-th last one. */
function replay(events, sizes, placement) {
  const driver = new Driver(placement), small = [], large = [], live = [], granted = [];
  const kernels = Math.max(0, (events.findIndex((age) => age) + 1 || events.length + 2) - 2);
  let allocated = 0, peak = 0, peakEvent = 0;
  for (let event = 0, next = 0; event < events.length; event++) {
    if (event === kernels) driver.letGo = BASE + HELD_ABOVE;
    const age = events[event], index = age ? next - age : next++;
    if (!sizes[index]) continue;
    if (age) {
      let block = live[index];
      allocated -= block.size;
      const { pool, previous, next: after } = block;
      if (previous?.free) {
        remove(pool, previous);
        previous.size += block.size;
        previous.next = after;
        if (after) after.previous = previous;
        block = previous;
      }
      if (after?.free) {
        remove(pool, after);
        block.size += after.size;
        block.next = after.next;
        if (block.next) block.next.previous = block;
      }
      block.free = true;
      add(pool, block);
      continue;
    }
    const size = up(sizes[index], 512), isSmall = size <= MIB, pool = isSmall ? small : large;
    let [block] = pool.splice(place(pool, size, -Infinity), 1);
    if (!block) {
      const segment = isSmall ? 2 * MIB : size < 10 * MIB ? 20 * MIB : up(size, 2 * MIB);
      block = { address: driver.take(segment), size: segment, pool };
    }
    block.free = false;
    if (block.size - size >= (isSmall ? 512 : MIB + 1)) {
      const rest = { address: block.address + size, size: block.size - size, pool, previous: block, free: true };
      rest.next = block.next;
      if (rest.next) rest.next.previous = rest;
      block.next = rest;
      block.size = size;
      add(pool, rest);
    }
    live[index] = block;
    allocated += granted[index] = block.size;
    if (allocated > peak) [peak, peakEvent] = [allocated, event];
  }
  return { reserved: driver.reserved, allocated: peak, peakEvent, granted };
}

// --- timelines (vram_guard/timeline) ---------------------------------------------------------------------------------

/** The timeline of a variant that holds on a card; undefined where none does. */
const timelineOn = (timelines, card) => timelines.find((one) => one.capabilities.includes(card.capability));

/** Bytes of every kind of block; of unknown workspaces 0, or with `most` the most that they may take. */
function sizesOf(timeline, length, batch, card, most = false) {
  if (timeline.beyond) throw new Unknown(timeline.beyond);
  const at = (number) => (typeof number === "number" ? number : number[0] + length * (number[1] + length * number[2]));
  const affine = ([base, perSample]) => at(base) + at(perSample) * batch;
  return timeline.kinds.map(([size, , rule, unknown]) => {
    if (unknown) return most ? affine(size) : 0;
    if (!rule.length) return affine(size);
    if (!Object.hasOwn(RULES, rule[0])) throw new Unknown(rule[0]);
    return RULES[rule[0]](rule[1], rule[2].map(affine), card);
  });
}

const remembered = new WeakMap();

/** The replays of one batch, for each way that segments may lie; the one that takes most is the last. */
function replays(timeline, kinds, card) {
  if (!remembered.has(timeline)) remembered.set(timeline, new Map());
  const known = remembered.get(timeline), sizes = timeline.blocks.map((kind) => kinds[kind]);
  if (!kinds.every((size) => size >= 0 && size < 2 ** 44)) throw new Unknown("2^44");
  if (known.size > 100) known.clear(); // each holds the bytes of all blocks
  return (card.placement ? [card.placement] : ["below", "above"]).map((placement) => {
    const key = placement + kinds;
    if (!known.has(key)) known.set(key, replay(timeline.events, sizes, placement));
    return known.get(key);
  }).sort((one, other) => one.reserved - other.reserved);
}

/** What the step takes at one batch size, as `Timeline.at` says. */
function answer(timeline, length, batch, card) {
  const found = replays(timeline, sizesOf(timeline, length, batch, card), card), result = found.at(-1);
  const breakdown = {}, alive = new Set();
  timeline.events.slice(0, result.peakEvent + 1).reduce((next, age) => {
    if (age) alive.delete(next - age);
    else alive.add(next);
    return next + !age;
  }, 0);
  for (const index of alive) {
    const category = timeline.kinds[timeline.blocks[index]][1];
    breakdown[category] = (breakdown[category] ?? 0) + (result.granted[index] ?? 0);
  }
  let upper = 0;
  if (timeline.kinds.some(([, , , unknown]) => unknown)) {
    const kinds = sizesOf(timeline, length, batch, card, true);
    const alone = Math.max(...kinds.filter((_, index) => timeline.kinds[index][3]));
    upper = Math.max(replays(timeline, kinds, card).at(-1).reserved, result.reserved + alone);
  }
  const lower = found[0].reserved < result.reserved ? found[0].reserved : 0;
  const [phase, step] = timeline.phases.findLast(([, , start]) => start <= result.peakEvent);
  return { reserved: result.reserved, allocated: result.allocated, lower, upper, breakdown, phase, step };
}

/** Bytes that are asked for and not given back, at the most: no replay reserves less, and this is quicker. */
function leastReserved(timeline, kinds) {
  const sizes = kinds.map((size) => up(size, 512));
  let live = 0, most = 0, next = 0;
  for (const age of timeline.events) {
    const size = sizes[timeline.blocks[age ? next - age : next++]];
    live += age ? -size : size;
    if (live > most) most = live;
  }
  return most;
}

/** As `largest_that_fits`: powers of two from the one below `near`, then bisection; 0: not even 1 fits. */
function seek(fits, near = 1) {
  let low = 0, high = 2 ** 20 + 1;
  for (let at = 2 ** Math.floor(Math.log2(Math.max(near, 1))); low < at && at < high;) {
    if (fits(at)) [low, at] = [at, at * 2];
    else [high, at] = [at, Math.floor(at / 2)];
  }
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (fits(middle)) low = middle;
    else high = middle;
  }
  return low;
}

/** The largest batch whose reserved peak is within so many bytes, as `Timeline.max_batch_size` says. */
function largest(timeline, length, card, usable) {
  const kindsAt = (batch) => sizesOf(timeline, length, batch, card);
  const mayFit = (batch) => leastReserved(timeline, kindsAt(batch)) <= usable;
  const fits = (batch) => mayFit(batch) && replays(timeline, kindsAt(batch), card).at(-1).reserved <= usable;
  return seek(fits, seek(mayFit));
}

/** The command that gives the same answer. */
function command(model, training, length, batch, gpu) {
  const words = ["vram-guard estimate --model", model];
  if (training.adapters) words.push(`--${training.adapters}`);
  if (training.checkpointing) words.push("--checkpointing");
  if (training.adapters) words.push("--dtype", training.dtype);
  words.push("--precision", training.precision);
  if (training.optimizer !== "adamw") words.push("--optimizer", training.optimizer);
  if (length) words.push("--seq-length", length);
  return [...words, "--batch", batch, "--gpu", `"${gpu}"`].join(" ");
}

/** A base64 text of deflated JSON, read. */
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

if (typeof module !== "undefined") module.exports = { answer, command, largest, timelineOn, unpacked };
