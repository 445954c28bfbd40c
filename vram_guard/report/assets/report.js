// What stands under the pointer, or under the arrow keys: bytes by category at one moment of the step.
"use strict";
(function () {
  function amount(bytes) {
    const units = [["TiB", 40], ["GiB", 30], ["MiB", 20], ["KiB", 10]];
    for (const [name, power] of units) {
      if (bytes >= 2 ** power) return (bytes / 2 ** power).toFixed(2) + " " + name;
    }
    return bytes + " B";
  }

  function read(data, column) {
    const parts = [];
    let sum = 0;
    data.layers.forEach(function (layer) {
      const bytes = layer.bytes[column];
      sum += bytes;
      if (bytes) parts.push(layer.name + " " + amount(bytes));
    });
    const head = data.words.allocated + " " + amount(sum) + ", " + data.words.reserved + " " + amount(data.reserved[column]);
    return head + "\n" + parts.join(" · ");
  }

  document.querySelectorAll("figure[data-chart]").forEach(function (figure) {
    const svg = figure.querySelector("svg");
    const readout = figure.querySelector(".readout");
    const cursor = svg.querySelector(".cursor");
    const data = JSON.parse(figure.querySelector("script").textContent);
    const area = data.area;
    let at = 0;

    function show(column) {
      at = Math.max(0, Math.min(data.events.length - 1, column));
      const x = area.left + (area.width * data.events[at]) / Math.max(1, data.last);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.style.visibility = "visible";
      readout.innerText = read(data, at);
    }

    function nearest(event) {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      const wanted = ((x - area.left) / area.width) * data.last;
      let low = 0;
      let high = data.events.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (data.events[middle] <= wanted) low = middle;
        else high = middle - 1;
      }
      return low;
    }

    svg.addEventListener("pointermove", function (event) { show(nearest(event)); });
    svg.addEventListener("keydown", function (event) {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -25, PageDown: 25 }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      show(at + by);
    });
    svg.addEventListener("focus", function () { if (!readout.innerText.trim()) show(data.peak); });
  });
})();
