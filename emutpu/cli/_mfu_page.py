"""The page of ``emutpu mfu --html``: one file that adds up the counted parts as its reader chooses."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emutpu._report import Document

__all__ = ["page"]

# The parts are counted in emutpu.simulator.mfu; the page only adds and divides.
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>__TITLE__</title><style>
:root{--ink:#1b2733;--soft:#5a6978;--line:#d5dee6;--paper:#fff;--card:#f5f8fb;--accent:#2f6f9f}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9aa9b7;--line:#33404d;--paper:#12181f;--card:#1a222b;--accent:#6db3e8}}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:860px;margin:0 auto;padding:32px 20px}h1{font-size:1.5rem;margin:0 0 2px}p{margin:0 0 20px;color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:14px;margin-bottom:20px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px}
.card b{display:block;font-size:1.9rem;line-height:1.2;font-variant-numeric:tabular-nums}.card span{color:var(--soft);font-size:.9rem}
fieldset{border:1px solid var(--line);border-radius:10px;padding:12px 16px;margin:0 0 20px;display:flex;flex-wrap:wrap;gap:10px 28px}
legend{padding:0 6px;color:var(--soft);font-size:.9rem}label{display:inline-flex;align-items:center;gap:7px}
input[type=number]{width:130px;padding:4px 8px;border:1px solid var(--line);border-radius:6px;background:var(--paper);color:inherit;font:inherit}
table{width:100%;border-collapse:collapse;font-variant-numeric:tabular-nums}th,td{padding:7px 8px;border-bottom:1px solid var(--line);text-align:left}
td.n,th.n{text-align:right;white-space:nowrap}th{font-weight:600;color:var(--soft);font-size:.9rem}tr.off{opacity:.35}
td.bar{width:38%}td.bar i{display:block;height:10px;border-radius:5px;background:var(--accent);min-width:1px}
footer{margin-top:20px;color:var(--soft);font-size:.88rem}
</style></head><body><main>
<h1>__HEADING__</h1><p>__SUBTITLE__</p>
<div class="cards"><div class="card"><b id="mfu">-</b><span>model FLOP utilisation</span></div>
<div class="card"><b id="flops">-</b><span>GFLOP per token</span></div>
<div class="card"><b id="rate">-</b><span>useful TFLOP/s, of <span id="peak"></span> peak</span></div></div>
<fieldset><legend>Attention</legend><label><input type="radio" name="context" value="causal" checked>causal</label>
<label><input type="radio" name="context" value="full">full</label></fieldset>
<fieldset><legend>Pass</legend><label><input type="radio" name="pass" value="training">training step</label>
<label><input type="radio" name="pass" value="forward">forward only</label></fieldset>
<fieldset><legend>Counted and measured</legend><label><input type="checkbox" id="head">LM head</label>
<label>tokens per second <input type="number" id="tokens" min="0" step="any"></label></fieldset>
<table><thead><tr><th>part</th><th class="n">GFLOP per token</th><th class="n">share</th><th></th></tr></thead><tbody id="parts"></tbody></table>
<footer>__FOOTER__</footer>
</main><script type="application/json" id="data">__DATA__</script><script>
const d=JSON.parse(document.getElementById("data").textContent),$=id=>document.getElementById(id);
const names={attention_projections:"attention projections",mlp:"MLP or active experts",attention_causal:"attention, causal",
attention_full:"attention, full",lm_head:"LM head"};
const f=(x,n)=>x.toLocaleString("en",{minimumFractionDigits:n,maximumFractionDigits:n});
document.querySelector(`[name=pass][value=${d.training?"training":"forward"}]`).checked=true;
$("head").checked=d.lm_head;if(d.tokens_per_second!==null)$("tokens").value=d.tokens_per_second;
function show(){const pick=n=>document.querySelector(`[name=${n}]:checked`).value,factor=pick("pass")==="training"?3:1;
const on={attention_projections:1,mlp:1,lm_head:$("head").checked,attention_causal:pick("context")==="causal",attention_full:pick("context")==="full"};
let total=0;for(const k in names)if(on[k])total+=factor*d.components[k];
$("parts").replaceChildren(...Object.keys(names).map(k=>{const v=factor*d.components[k],r=document.createElement("tr"),s=on[k]?v/total:0;
r.className=on[k]?"":"off";for(const[t,c]of[[names[k],""],[f(v/1e9,2),"n"],[on[k]?f(100*s,1)+" %":"not counted","n"]]){
const e=document.createElement("td");e.textContent=t;e.className=c;r.append(e)}
const b=document.createElement("td"),i=document.createElement("i");b.className="bar";i.style.width=100*s+"%";if(on[k])b.append(i);r.append(b);return r}));
const t=parseFloat($("tokens").value);$("flops").textContent=f(total/1e9,2);$("peak").textContent=f(d.peak_flops/1e12,1);
$("rate").textContent=t>0?f(total*t/1e12,1):"-";$("mfu").textContent=t>0?f(100*total*t/d.peak_flops,1)+" %":"-"}
document.addEventListener("input",show);show();
</script></body></html>
"""


def page(document: Document) -> str:
    """The page for one ``emutpu.mfu`` document. Self-contained: nothing is loaded from anywhere."""
    heading = f"{document['model']} on TPU {document['chip']}"
    subtitle = (
        f"{document['sequence']:,} tokens per sequence; throughput per {document['per']}, whose {document['dtype']} peak is "
        f"{document['peak_flops'] / 1e12:,.1f} TFLOP/s"
    )
    notes = " ".join(
        str(note)[:1].upper() + str(note)[1:] + "." for name, note in document["notes"].items() if name != "mfu"
    )
    footer = (
        "A multiply-add counts two; a training step three forward passes; recomputation nothing. Causal attention sees half "
        f"the sequence on average, a window at most its width. {notes} emutpu {document['emutpu']}."
    )
    data = json.dumps(document).replace("<", "\\u003c")
    texts = {"TITLE": f"MFU: {heading}", "HEADING": heading, "SUBTITLE": subtitle, "FOOTER": footer}
    text = _PAGE
    for name, value in texts.items():
        text = text.replace(f"__{name}__", escape(value))
    return text.replace("__DATA__", data)
