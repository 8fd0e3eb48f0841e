// Opens the page in a browser and runs one upload: browser.mjs PAGE CHROMIUM OPTIONS
import { chromium } from 'playwright-core'

const [page_url, executablePath, options] = process.argv.slice(2)
const browser = await chromium.launch({ executablePath, args: ['--no-sandbox'] })
try {
  const page = await browser.newPage()
  const said = []
  page.on('console', (message) => said.push(message.text()))
  await page.goto(page_url)
  const result = await page.evaluate((given) => window.run(given), JSON.parse(options))
  console.log(JSON.stringify({ ...result, said }))
} finally {
  await browser.close()
}
