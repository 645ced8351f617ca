/* A curve behind three sliders, over the points that the page carries as JSON, without a server.
   fl_privacy_lib/reproduction/explorer.py writes the points, a figure and a sentence; this script puts sliders and a curve in the figure's place. Without it the figure stays. */
(function () {
  "use strict";

  const HEIGHT = 300, LEFT = 56, RIGHT = 16, TOP = 28, BOTTOM = 46;

  function shown(value) {
    return value >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  }

  const compact = new Intl.NumberFormat("en", { notation: "compact" });  // 10K: labels fit a phone

  function svg(name, attributes, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function decades(values) {
    return [Math.floor(Math.log10(values[0])), Math.ceil(Math.log10(values[values.length - 1]))];
  }

  function explore(root) {
    const data = JSON.parse(root.querySelector("script").textContent);
    const steps = data.sliders[2][1];
    const symbols = data.sliders.map(([name]) => name.split(" ").pop());
    const all = data.values.flat(2).filter((value) => value > 0).sort((a, b) => a - b);
    const [x0, x1] = decades(steps), [y0, y1] = decades(all);  // the axes stay while the curve moves
    const picture = svg("svg", { role: "img", height: HEIGHT });
    const controls = document.createElement("div"), output = document.createElement("output");
    controls.className = "controls";

    const inputs = data.sliders.map(function ([name, values], index) {
      const label = document.createElement("label"), value = document.createElement("span");
      const input = document.createElement("input"), title = document.createElement("span");
      title.textContent = name + " = ";
      title.append(value);
      Object.assign(input, { type: "range", min: 0, max: values.length - 1, step: 1 });
      input.value = data.start[index];
      input.addEventListener("input", update);
      label.append(title, input);
      controls.append(label);
      return { input, value, values };
    });

    function update() {
      const at = inputs.map(({ input }) => Number(input.value));
      const words = inputs.map(({ values }, i) => shown(values[at[i]]));
      inputs.forEach(function ({ input, value }, i) {
        value.textContent = words[i];
        input.setAttribute("aria-valuetext", words[i]);
      });
      const curve = data.values[at[0]][at[1]];
      const parts = [...words, shown(curve[at[2]])];
      const sentence = data.sentence.replace(/\{\}/g, () => parts.shift());
      if (output.textContent !== sentence) output.textContent = sentence;
      draw(curve, at[2], words);
    }

    function draw(curve, at, words) {
      const width = Math.max(240, Math.min(root.clientWidth, 720));
      const right = width - RIGHT, bottom = HEIGHT - BOTTOM;
      const x = (t) => LEFT + (right - LEFT) * (Math.log10(t) - x0) / (x1 - x0);
      const y = (e) => bottom - (bottom - TOP) * (Math.log10(Math.max(e, 10 ** y0)) - y0) / (y1 - y0);
      picture.setAttribute("width", width);
      picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      picture.setAttribute("aria-label", `Curve of ${data.symbol} over ${data.sliders[2][0]} at ${symbols[0]} = ${words[0]} and ${symbols[1]} = ${words[1]}, ` +
        `both axes logarithmic, with a mark at ${symbols[2]} = ${words[2]}, ${data.symbol} = ${shown(curve[at])}`);
      picture.replaceChildren();
      for (let d = x0; d <= x1; d++) {
        picture.append(svg("line", { class: "grid", x1: x(10 ** d), x2: x(10 ** d), y1: TOP, y2: bottom }));
        picture.append(svg("text", { x: x(10 ** d), y: bottom + 18, "text-anchor": d === x1 ? "end" : "middle" },
          compact.format(10 ** d)));
      }
      for (let d = y0; d <= y1; d++) {
        picture.append(svg("line", { class: "grid", x1: LEFT, x2: right, y1: y(10 ** d), y2: y(10 ** d) }));
        picture.append(svg("text", { x: LEFT - 6, y: y(10 ** d) + 4, "text-anchor": "end" },
          d < 0 ? (10 ** d).toFixed(-d) : compact.format(10 ** d)));
      }
      picture.append(svg("text", { x: (LEFT + right) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, data.sliders[2][0]));
      picture.append(svg("text", { x: LEFT, y: 14, "text-anchor": "middle" }, data.symbol));
      const px = x(steps[at]), py = y(curve[at]);
      picture.append(svg("path", { class: "guide", d: `M${LEFT},${py}H${px}V${bottom}` }));
      picture.append(svg("polyline", { class: "curve", points: steps.map((t, i) => `${x(t)},${y(curve[i])}`).join(" ") }));
      picture.append(svg("circle", { class: "mark", cx: px, cy: py, r: 6 }));
    }

    root.querySelectorAll("img, p").forEach((node) => node.remove());
    root.append(controls, picture, output);
    update();
    window.addEventListener("resize", update);
  }

  function start() { document.querySelectorAll(".privacy-explorer").forEach(explore); }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
}());
