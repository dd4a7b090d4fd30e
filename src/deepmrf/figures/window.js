document.querySelectorAll("figure.window").forEach(figure => {
  const n = JSON.parse(figure.dataset.kernel), image = figure.querySelector("img");
  const [photo, map] = figure.querySelectorAll("canvas"), text = figure.querySelector("output");
  const [m, k] = n.window, zoom = Math.max(3, Math.floor(330 / Math.max(m, k)));
  const draw = (x, y) => {
    const ink = photo.getContext("2d", {willReadFrequently: true});
    const width = photo.width = image.naturalWidth, height = photo.height = image.naturalHeight;
    ink.drawImage(image, 0, 0);
    const data = ink.getImageData(0, 0, width, height).data;
    const at = (a, b, c) => data[4 * (b * width + a) + c] / 255, values = [];
    let most = 1e-12;
    for (let dy = -Math.floor(m / 2); dy < m - Math.floor(m / 2); dy++)
      for (let dx = -Math.floor(k / 2); dx < k - Math.floor(k / 2); dx++) {
        const a = x + dx, b = y + dy;
        if (a < 0 || b < 0 || a >= width || b >= height || (!dx && !dy)) { values.push(0); continue }
        let colour = 0;
        for (let c = 0; c < 3; c++) colour += (at(x, y, c) - at(a, b, c)) ** 2;
        const far = (dy * n.spacing[0]) ** 2 + (dx * n.spacing[1]) ** 2;
        const sum = n.colour * colour + n.position * far;
        const d = !n.gaussian ? sum
          : Math.exp(-sum) + n.smooth_weight * Math.exp(-far / (2 * n.smooth_width ** 2));
        values.push(d); most = Math.max(most, d);
      }
    map.width = k * zoom; map.height = m * zoom;
    const paint = map.getContext("2d");
    values.forEach((d, i) => {
      const s = Math.round(255 * d / most);
      paint.fillStyle = `rgb(${s}, ${Math.round(34 + 0.8 * s)}, ${Math.round(78 - 0.1 * s)})`;
      paint.fillRect((i % k) * zoom, Math.floor(i / k) * zoom, zoom, zoom);
    });
    paint.strokeStyle = "white";
    paint.strokeRect(Math.floor(k / 2) * zoom, Math.floor(m / 2) * zoom, zoom, zoom);
    ink.strokeStyle = "yellow"; ink.lineWidth = 2;
    ink.strokeRect(x - Math.floor(k / 2), y - Math.floor(m / 2), k, m);
    text.textContent = `pixel ${x}, ${y}: the largest d(j, z) is ${most.toPrecision(3)}`;
  };
  const start = () => draw(...n.pixel);
  image.complete ? start() : image.addEventListener("load", start);
  photo.addEventListener("click", event => {
    const box = photo.getBoundingClientRect();
    draw(Math.floor((event.clientX - box.left) * photo.width / box.width),
         Math.floor((event.clientY - box.top) * photo.height / box.height));
  });
});
