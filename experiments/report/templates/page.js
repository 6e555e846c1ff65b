// Contents at the side, from the headings.
for (const heading of document.querySelectorAll('h2')) {
  heading.id = heading.textContent.toLowerCase().replace(/\W+/g, '-');
  const link = document.querySelector('nav').appendChild(document.createElement('a'));
  link.href = '#' + heading.id;
  link.textContent = heading.textContent;
}

// Charts take the width of their place, also when it changes; inside what is folded there is none yet.
const dark = matchMedia('(prefers-color-scheme: dark)');
function draw(again) {
  const theme = dark.matches ? 'dark' : undefined;
  for (const chart of document.querySelectorAll('.chart')) {
    if (!chart.clientWidth || (chart.hasChildNodes() && !again)) continue;
    vegaEmbed(chart, JSON.parse(chart.nextElementSibling.textContent), {
      theme,
      ast: true,  // expressions are interpreted: the page allows no eval
      renderer: 'svg',
      actions: { source: false, compiled: false, editor: false },
      tooltip: { theme },
    });
  }
}
// Tables that are wider than their place say that they scroll.
function fit() {
  for (const table of document.querySelectorAll('.wide')) {
    table.classList.toggle('scrolls', table.scrollWidth > table.clientWidth);
  }
}
dark.addEventListener('change', () => draw(true));
addEventListener('resize', fit);
document.addEventListener('toggle', () => { draw(); fit(); }, true);
draw();
fit();
