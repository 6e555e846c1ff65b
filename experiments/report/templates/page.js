const dark = matchMedia('(prefers-color-scheme: dark)');
function draw() {
  const theme = dark.matches ? 'dark' : 'light';
  for (const figure of document.querySelectorAll('figure')) {
    const chart = JSON.parse(figure.querySelector('script').textContent);
    vegaEmbed(figure.querySelector('.chart'), chart, {
      config: themes[theme],
      ast: true,  // expressions are interpreted: the page allows no eval
      renderer: 'svg',
      actions: { export: true, source: false, compiled: false, editor: false },
      tooltip: { theme },
    });
  }
}
dark.addEventListener('change', draw);
draw();
