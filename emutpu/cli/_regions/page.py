def render(document, folder): return ''
