"""All kinds of messages, as bytes that no parser may change."""

DEEP = 100
INITIALIZE = (
    '{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{"experimental":'
    '{"vendor.example/x":{"n":1.0,"deep":[{}]}},"sampling":{"tools":{}},"roots":{"listChanged":true},"elicitation":{},'
    '"unknownCapability":{"a":null}},"clientInfo":{"name":"m","title":"M\\u00e9","version":"0","icons":[],"vendor":7}}}'
)


def request(method, params="{}", id="1", more=""):
    return f'{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{params}{more}}}'


def call(arguments, more="", id="1"):
    return request("tools/call", f'{{"name":"echo","arguments":{arguments}{more}}}', id)


def notification(method, params="{}"):
    return f'{{"jsonrpc":"2.0","method":"{method}","params":{params}}}'


# The messages after INITIALIZE, one per line.
MESSAGES = [
    # Requests that a client can send.
    request("ping"),
    '{"jsonrpc":"2.0","id":1,"method":"ping"}',
    request("tools/list", '{"cursor":"eyJwIjoyfQ=="}'),
    request("resources/list"),
    request("resources/templates/list"),
    request("resources/read", '{"uri":"file:///a%20b?x=1#y"}'),
    request("resources/subscribe", '{"uri":"file:///a"}'),
    request("prompts/list"),
    request("prompts/get", '{"name":"p","arguments":{"a":"b"}}'),
    request("completion/complete", '{"ref":{"type":"ref/prompt","name":"p"},"argument":{"name":"a","value":""},"context":{}}'),
    request("logging/setLevel", '{"level":"debug"}'),
    # Calls with all kinds of numbers.
    call("{}"),
    call('{"a":1.0,"b":1.50,"c":-0.0,"d":-0,"e":1e3,"f":1E+3,"g":0.1e-7}'),
    call('{"a":9007199254740993,"b":18446744073709551616,"c":123456789012345678901234567890,"d":-9223372036854775809}'),
    call('{"a":3.14159265358979323846264338327950288,"b":1e400,"c":5e-324}'),
    call('{"a":0.30000000000000004,"b":100000000000000000000000.0}'),
    # Tasks and progress.
    call("{}", ',"task":{"ttl":60000}'),
    call("{}", ',"task":{"ttl":60000.0,"vendor":[1]},"_meta":{"progressToken":7}'),
    call("{}", ',"_meta":{"progressToken":"p-\\u0031","io.modelcontextprotocol/related-task":{"taskId":"t"}}'),
    request("tasks/get", '{"taskId":"t"}'),
    request("tasks/result", '{"taskId":"t"}'),
    request("tasks/list"),
    request("tasks/cancel", '{"taskId":"t"}'),
    # Unknown methods.
    request("vendor.example/do", '{"x":{"y":[1,2.0,null,true,{"z":""}]}}'),
    request("tools/call", '{"name":"echo","arguments":{},"unknown":{"a":1}}', more=',"vendor":{"trace":"00-ab"},"z":null'),
    request("tools/call", '{"arguments":[1,2]}'),
    request("unknown", "[1,2.50,\"three\"]"),
    # Ids.
    call("{}", id='"text"'),
    call("{}", id='""'),
    call("{}", id="0"),
    call("{}", id="-7"),
    call("{}", id="9007199254740993"),
    call("{}", id='"\\u0061\\/b \\ud83d\\ude00"'),
    call("{}", id='"1"'),
    # Text.
    call('{"a":"\\u00e9\\u0000\\ud83d\\ude00\\/\\b\\f\\n\\r\\t\\"\\\\"}'),
    call('{"a":"é 😀 \u2028\u2029 \ufeff","é":"日本"}'),
    call('{"a":"event: x\\n\\ndata: y","b":": c","c":"id: 1"}'),
    call('{"a":"\\ud800 alone"}'),
    call('{"a":"' + "x" * 300_000 + '"}'),
    # Shapes.
    call('{"a":1,"a":2,"a":{"a":1,"a":2}}'),
    call('{"":"","\\u0061":1,"a":2}'),
    call("[" * DEEP + "]" * DEEP),
    ' { "params" : { "arguments" : { } ,\t"name" : "echo" } , "method" : "tools\\/call" , "id" : 1 , "jsonrpc" : "2.0" } '.strip(),
    # Notifications, and answers to the server.
    notification("notifications/initialized"),
    notification("notifications/cancelled", '{"requestId":404,"reason":"\\u0061","n":1.0}'),
    notification("notifications/progress", '{"progressToken":"x","progress":0.50,"total":1.0}'),
    notification("notifications/roots/list_changed"),
    notification("notifications/vendor", '{"a":1e2}'),
    '{"jsonrpc":"2.0","id":"ask","result":{"roots":[],"n":1.0,"big":123456789012345678901}}',
    '{"jsonrpc":"2.0","id":"ask","error":{"code":-32000,"message":"\\u006eo","data":{"n":1.0}}}',
]
