// Browsers start no workers for pages opened from the disk. There the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.queue = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inner = frame.contentWindow
      window.addEventListener("message", event => {
        if (event.source !== this.inner) return
        const copy = new MessageEvent("message", { data: event.data })
        this.dispatchEvent(copy)
        if (this.onmessage) this.onmessage(copy)
      })
      const inner = this.inner
      inner.document.open()
      inner.document.write(`<script>
        function postMessage(data) { parent.postMessage(data, "*") }
        function importScripts(...urls) {
          return urls.reduce((done, url) => done.then(() => new Promise((resolve, reject) => {
            const script = document.createElement("script")
            script.src = url
            script.onload = resolve
            script.onerror = reject
            document.body.appendChild(script)
          })), Promise.resolve())
        }
      <\/script><body><script src="${url}"><\/script></body>`)
      inner.document.close()
      frame.addEventListener("load", () => {
        this.ready = true
        this.queue.splice(0).forEach(data => this.postMessage(data))
      })
    }
    postMessage(data) {
      if (!this.ready) return void this.queue.push(data)
      this.inner.dispatchEvent(new MessageEvent("message", { data }))
    }
    terminate() {}
  }
}
