// The viewer: pick or drop files, then network and MRF under one slider, labels to hover over, and what changed.
// Gradio gives `element`, `props`, `trigger` and `watch`; props.value is what Session.view returns.
const find = (selector) => element.querySelector(selector);
const root = find(".viewer"), canvas = find("canvas"), split = find(".split"), tip = find(".tip");
const files = props.slots.map(() => null);
let shown = null, mode = "labels", picked = null, sides = null;

function make(tag, parent, text = "", className = "") {
  const child = document.createElement(tag);
  child.textContent = text;
  child.className = className;
  parent.append(child);
  return child;
}

function fail(message) {
  find(".error").textContent = message;
  find(".error").hidden = !message;
  root.classList.remove("busy");
}

// Files go to the server one by one; when all are there, Python reads them.
async function send(file) {
  const address = "deepmrf/files?name=" + encodeURIComponent(file.name);
  const answer = await fetch(address, { method: "POST", body: file });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.text();
}

async function receive(slot, file) {
  if (!file) return;
  files[slot] = file;
  root.querySelectorAll(".pick")[slot].textContent = file.name;
  if (files.includes(null)) return;
  fail("");
  root.classList.add("busy");
  try {
    const names = [];
    for (const file of files) names.push(await send(file));
    trigger("upload", { files: names });
  } catch (error) {
    fail(error.message || "The server does not answer: start it again.");
  }
}

props.slots.forEach((slot, index) => {
  const button = make("button", find(".pickers"), slot.label, "pick");
  const input = make("input", find(".pickers"));
  Object.assign(input, { type: "file", accept: slot.accept, hidden: true });
  input.setAttribute("aria-label", slot.label);
  input.addEventListener("change", () => { receive(index, input.files[0]); input.value = ""; });
  button.addEventListener("click", () => input.click());
});
find(".hint").textContent = props.hint;
root.querySelectorAll(".before").forEach((place) => (place.textContent = props.before));
// On phones, the picture stays in sight while the controls below it are moved (viewer.css).
new IntersectionObserver(([entry]) => {
  find(".stage").classList.toggle("pinned", !entry.isIntersecting && entry.boundingClientRect.top < 0);
}).observe(split);
root.addEventListener("dragover", (event) => { event.preventDefault(); root.classList.add("over"); });
root.addEventListener("dragleave", () => root.classList.remove("over"));
root.addEventListener("drop", (event) => {
  event.preventDefault();
  root.classList.remove("over");
  [...event.dataTransfer.files].slice(0, files.length).forEach((file, index, dropped) => {
    const array = /\.np[yz]$/i.test(file.name) ? 1 : 0;
    receive(files.length === 1 ? 0 : dropped.length > 1 ? index : array || (files[0] ? 1 : 0), file);
  });
});

async function pixels(address) {
  const image = new Image();
  image.src = address;
  await image.decode();
  const sheet = new OffscreenCanvas(image.width, image.height);
  const context = sheet.getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0);
  return context.getImageData(0, 0, image.width, image.height);
}

// One side of the slider, as the mode asks for it: maps hold the label in red and the confidence in green.
function paint(maps) {
  const { picture, network, result, colours } = shown, width = picture.width;
  const image = new ImageData(new Uint8ClampedArray(picture.data), width);
  const out = image.data, share = find(".opacity input").value / 100;
  for (let i = 0; i < out.length; i += 4) {
    const label = maps[i];
    let colour = colours[label], weight = share;
    if (mode === "picture") continue;
    if (mode === "confidence") {
      colour = [255, 110, 0];
      weight = 1 - maps[i + 1] / 255;
    } else if (mode === "changes") {
      const from = network.data[i], to = result.data[i];
      if (from === to || (picked && (picked.from !== from || picked.to !== to))) {
        colour = [0, 0, 0].fill(60 + 0.3 * (out[i] + out[i + 1] + out[i + 2]) / 3);
        weight = 0.9;
      } else {
        colour = colour || [255, 255, 255];
        weight = 0.85;
      }
    } else {
      const x = (i / 4) % width;
      if ((x && maps[i - 4] !== label) || (i >= 4 * width && maps[i - 4 * width] !== label)) {
        colour = [255, 255, 255];
        weight = 1;
      }
    }
    if (colour) for (let c = 0; c < 3; c++) out[i + c] = (1 - weight) * out[i + c] + weight * colour[c];
  }
  const sheet = new OffscreenCanvas(width, picture.height);
  sheet.getContext("2d").putImageData(image, 0, 0);
  return sheet;
}

function draw() {
  if (!shown) return;
  const { width, height } = shown.picture, x = Math.round((width * split.value) / 1000);
  const context = canvas.getContext("2d");
  context.drawImage(sides[1], 0, 0);
  if (x > 0) context.drawImage(sides[0], 0, 0, x, height, 0, 0, x, height);
  find(".line").style.left = split.value / 10 + "%";
}

function repaint() {
  sides = [paint(shown.network.data), paint(shown.result.data)];
  root.querySelectorAll(".modes button").forEach((b) => b.setAttribute("aria-pressed", b.dataset.mode === mode));
  draw();
}

const tenths = (share) => (share < 0.0005 && share > 0 ? "<0.1%" : (100 * share).toFixed(1) + "%");
const percent = (share) => (share > 0 && share < 0.005 ? "<1%" : Math.round(100 * share) + "%");

function swatch(parent, label) {
  const colour = shown.colours[label];
  make("i", parent, "", "swatch").style.background = colour ? `rgb(${colour})` : "transparent";
  parent.append(shown.names[label]);
}

function list() {
  const body = find(".classes tbody"), changes = find(".changes ul"), downloads = find(".downloads");
  body.replaceChildren();
  for (const row of shown.classes) {
    const line = make("tr", body);
    swatch(make("td", line), row.label);
    for (const share of [row.before, row.after, row.confidence]) make("td", line, percent(share));
  }
  find(".changes h4").textContent = `The MRF changed ${tenths(shown.changed)} of the pixels`;
  changes.replaceChildren();
  for (const change of shown.changes) {
    const button = make("button", make("li", changes));
    swatch(button, change.from);
    button.append(" \u2192 ");
    swatch(button, change.to);
    make("b", button, tenths(change.share));
    button.addEventListener("click", () => {
      picked = picked && picked.from === change.from && picked.to === change.to ? null : change;
      mode = "changes";
      repaint();
    });
  }
  downloads.replaceChildren();
  for (const name of shown.downloads) {
    const link = make("a", downloads, name);
    link.href = `deepmrf/results/${shown.session}/${name}`;
    link.download = `${shown.name}_${name}`;
  }
  find(".note").textContent = shown.note;
}

async function update() {
  const value = props.value;
  if (!value) return;
  if (value.error) return fail(value.error);
  const [picture, network, result] = await Promise.all([value.picture, value.network, value.result].map(pixels));
  if (value !== props.value) return; // a newer one is on its way
  if (!shown || shown.session !== value.session) picked = null;
  shown = { ...value, picture, network, result };
  [canvas.width, canvas.height] = [picture.width, picture.height];
  find(".stage").style.width = `min(100%, ${(68 * picture.width) / picture.height}vh)`;
  fail("");
  files.fill(null);
  root.querySelectorAll(".pick").forEach((button, index) => (button.textContent = props.slots[index].label));
  root.classList.add("full");
  find(".shown").hidden = false;
  list();
  repaint();
  find(".holder").style.minHeight = find(".stage").offsetHeight + "px"; // for the time when it is pinned
  root.dataset.drawn = 1 + Number(root.dataset.drawn);
}

// What is under the pointer, by both.
canvas.addEventListener("pointermove", (event) => {
  const { width, height } = shown.picture, box = canvas.getBoundingClientRect();
  const x = Math.floor(((event.clientX - box.left) * width) / box.width);
  const y = Math.floor(((event.clientY - box.top) * height) / box.height);
  if (event.buttons) {
    split.value = (1000 * x) / width;
    draw();
  }
  if (x < 0 || y < 0 || x >= width || y >= height) return (tip.hidden = true);
  tip.replaceChildren();
  for (const [who, maps] of [[props.before, shown.network.data], ["MRF", shown.result.data]]) {
    const i = 4 * (y * width + x), line = make("div", tip);
    make("small", line, who);
    swatch(line, maps[i]);
    make("b", line, percent(maps[i + 1] / 255));
  }
  tip.hidden = false;
  tip.style.left = Math.min(event.clientX - box.left + 14, box.width - tip.offsetWidth - 4) + "px";
  tip.style.top = Math.max(event.clientY - box.top - tip.offsetHeight - 10, 4) + "px";
});
canvas.addEventListener("pointerleave", () => (tip.hidden = true));
split.addEventListener("input", draw);
find(".opacity input").addEventListener("input", () => shown && repaint());
find(".modes").addEventListener("click", (event) => {
  if (!event.target.dataset.mode) return;
  [mode, picked] = [event.target.dataset.mode, null];
  repaint();
});
watch("value", update);
