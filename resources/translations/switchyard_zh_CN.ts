<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE TS>
<TS version="2.1" language="zh_CN" sourcelanguage="en">
    <context>
        <name>AboutCard</name>
        <message>
            <source>About</source>
            <translation>关于</translation>
        </message>
        <message>
            <source>Licences</source>
            <translation>许可证</translation>
        </message>
        <message>
            <source>Open logs</source>
            <translation>打开日志</translation>
        </message>
        <message>
            <source>Switchyard {0}</source>
            <translation>Switchyard {0}</translation>
        </message>
        <message>
            <source>Python {0}, Qt {1}</source>
            <translation>Python {0}，Qt {1}</translation>
        </message>
        <message>
            <source>Logs</source>
            <translation>日志</translation>
        </message>
        <message>
            <source>Contain no prompts and no answers: {0}</source>
            <translation>不包含提示词和回答：{0}</translation>
        </message>
        <message>
            <source>Save report…</source>
            <translation>保存报告…</translation>
        </message>
        <message>
            <source>Report</source>
            <translation>报告</translation>
        </message>
        <message>
            <source>One file to attach to a bug report: versions, hardware, findings and the end of the logs. </source>
            <translation>一个可附在故障报告中的文件：版本、硬件、检测结果和日志末尾。</translation>
        </message>
        <message>
            <source>No prompts, no names; nothing is sent.</source>
            <translation>不含提示词和姓名；不会发送任何内容。</translation>
        </message>
        <message>
            <source>Looking at this PC…</source>
            <translation>正在检查这台电脑…</translation>
        </message>
        <message>
            <source>It is in {0}: read it before you pass it on.</source>
            <translation>报告位于 {0}：转交前请先查看。</translation>
        </message>
    </context>
    <context>
        <name>AnswerCard</name>
        <message>
            <source>Answers</source>
            <translation>回答</translation>
        </message>
        <message>
            <source>More sampling…</source>
            <translation>更多采样设置…</translation>
        </message>
        <message>
            <source>Max</source>
            <translation>上限</translation>
        </message>
        <message>
            <source>tokens</source>
            <translation>token</translation>
        </message>
        <message>
            <source>Temperature</source>
            <translation>温度</translation>
        </message>
        <message>
            <source>Max tokens per answer</source>
            <translation>每个回答的 token 上限</translation>
        </message>
        <message>
            <source>Answer must be</source>
            <translation>回答的形式</translation>
        </message>
        <message>
            <source>Text</source>
            <translation>文本</translation>
        </message>
        <message>
            <source>One of choices</source>
            <translation>从选项中选一个</translation>
        </message>
        <message>
            <source>JSON with a schema</source>
            <translation>符合架构的 JSON</translation>
        </message>
        <message>
            <source>Choices</source>
            <translation>选项</translation>
        </message>
        <message>
            <source>One choice per line, such as
positive
negative</source>
            <translation>每行一个选项，例如
正面
负面</translation>
        </message>
        <message>
            <source>JSON schema</source>
            <translation>JSON 架构</translation>
        </message>
        <message>
            <source>Enter at least two choices, one per line.</source>
            <translation>请至少输入两个选项，每行一个。</translation>
        </message>
        <message>
            <source>Enter the JSON schema that answers must follow.</source>
            <translation>请输入回答必须遵循的 JSON 架构。</translation>
        </message>
        <message>
            <source>The schema is not a JSON object.</source>
            <translation>该架构不是 JSON 对象。</translation>
        </message>
        <message>
            <source>The schema is not JSON: {0}.</source>
            <translation>该架构不是有效的 JSON：{0}。</translation>
        </message>
        <message>
            <source>Default answer settings</source>
            <translation>默认回答设置</translation>
        </message>
    </context>
    <context>
        <name>AnswerMessage</name>
        <message>
            <source>Copy the answer</source>
            <translation>复制回答</translation>
        </message>
        <message>
            <source>Answer again</source>
            <translation>重新回答</translation>
        </message>
        <message>
            <source>Continue in a new chat</source>
            <translation>在新对话中继续</translation>
        </message>
        <message>
            <source>Edit the answer</source>
            <translation>编辑回答</translation>
        </message>
        <message>
            <source>Delete the answer</source>
            <translation>删除回答</translation>
        </message>
        <message>
            <source>Continue</source>
            <translation>继续</translation>
        </message>
        <message>
            <source>Restart engine</source>
            <translation>重启引擎</translation>
        </message>
        <message>
            <source>Fold earlier turns</source>
            <translation>总结较早的消息</translation>
        </message>
        <message>
            <source>The model summarises them, and reads the summary instead.</source>
            <translation>模型会进行总结，之后改读总结。</translation>
        </message>
        <message>
            <source>Leave out the oldest</source>
            <translation>略去最早的消息</translation>
        </message>
        <message>
            <source>The engine is not running. Restart it to get your answer.</source>
            <translation>引擎未运行。请重启引擎以获得回答。</translation>
        </message>
        <message>
            <source>folded, not sent</source>
            <translation>已总结，不发送</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>已复制</translation>
        </message>
    </context>
    <context>
        <name>AnswerView</name>
        <message>
            <source>Answer</source>
            <translation>回答</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>复制</translation>
        </message>
        <message>
            <source>Copy link</source>
            <translation>复制链接</translation>
        </message>
        <message>
            <source>Select all</source>
            <translation>全选</translation>
        </message>
        <message>
            <source>Copy all as plain text</source>
            <translation>全部复制为纯文本</translation>
        </message>
        <message>
            <source>Copy all as Markdown</source>
            <translation>全部复制为 Markdown</translation>
        </message>
    </context>
    <context>
        <name>ApiServer</name>
        <message>
            <source>Port {0} is in use by another program, or not allowed. Choose another one.</source>
            <translation>端口 {0} 被其他程序占用或不被允许。请另选一个。</translation>
        </message>
        <message>
            <source>The server stopped unexpectedly. Turn it off and on again.</source>
            <translation>服务器意外停止。请先关闭再重新打开。</translation>
        </message>
        <message>
            <source>The server could not be started. Reinstall Switchyard.</source>
            <translation>无法启动服务器。请重新安装 Switchyard。</translation>
        </message>
    </context>
    <context>
        <name>Asking</name>
        <message>
            <source>Cancel</source>
            <translation>取消</translation>
        </message>
        <message>
            <source>A batch job is running.</source>
            <translation>有一个批处理任务正在运行。</translation>
        </message>
        <message>
            <source>Loading a model pauses it. No answered row is lost: you can resume it later, with the same model and precision.</source>
            <translation>加载模型会使其暂停。已回答的行不会丢失：之后可用相同的模型和精度继续。</translation>
        </message>
        <message>
            <source>Pause the job</source>
            <translation>暂停任务</translation>
        </message>
        <message numerus="yes">
            <source>{0} batch jobs are running.</source>
            <translation>
                <numerusform>有 {0} 个批处理任务正在运行。</numerusform>
            </translation>
        </message>
        <message>
            <source>Loading a model pauses them. No answered row is lost: you can resume them later, with the same model and precision.</source>
            <translation>加载模型会使它们暂停。已回答的行不会丢失：之后可用相同的模型和精度继续。</translation>
        </message>
        <message>
            <source>Pause the jobs</source>
            <translation>暂停任务</translation>
        </message>
    </context>
    <context>
        <name>Attaching</name>
        <message>
            <source>A message takes up to {0} documents: attach the folder that they are in.</source>
            <translation>一条消息最多可附 {0} 个文档：请改为附上文档所在的文件夹。</translation>
        </message>
    </context>
    <context>
        <name>AttachmentChip</name>
        <message>
            <source>Remove {0}</source>
            <translation>移除 {0}</translation>
        </message>
    </context>
    <context>
        <name>Batch</name>
        <message>
            <source>Row {0}</source>
            <translation>第 {0} 行</translation>
        </message>
        <message>
            <source>{0} tokens</source>
            <translation>{0} 个 token</translation>
        </message>
        <message>
            <source>The row {0}.</source>
            <translation>该行：{0}。</translation>
        </message>
        <message>
            <source>(an empty answer)</source>
            <translation>（空回答）</translation>
        </message>
        <message>
            <source>Files of prompts</source>
            <translation>提示词文件</translation>
        </message>
        <message>
            <source>tomorrow {0}</source>
            <translation>明天 {0}</translation>
        </message>
        <message>
            <source>d MMM</source>
            <translation>M月d日</translation>
        </message>
        <message>
            <source>d MMM yyyy</source>
            <translation>yyyy年M月d日</translation>
        </message>
        <message>
            <source>One row</source>
            <translation>一行</translation>
        </message>
        <message>
            <source>{0} to {1} tokens/s</source>
            <translation>{0} 至 {1} token/秒</translation>
        </message>
        <message>
            <source>done between {0} and {1}</source>
            <translation>{0} 至 {1} 之间完成</translation>
        </message>
        <message>
            <source>done at about {0}</source>
            <translation>约 {0} 完成</translation>
        </message>
        <message>
            <source>Measured on the trial rows, ±{0}.</source>
            <translation>根据试运行的行实测，±{0}。</translation>
        </message>
        <message>
            <source>done by {0} even if every answer takes all {1} tokens</source>
            <translation>即使每个回答都用满 {1} 个 token，也会在 {0} 前完成</translation>
        </message>
        <message>
            <source>Predicted, ±{0}; a trial of the first rows is more exact.</source>
            <translation>预测值，±{0}；先试最初几行会更准确。</translation>
        </message>
        <message>
            <source>One row at a time: {0} tokens/s.</source>
            <translation>逐行处理：{0} token/秒。</translation>
        </message>
        <message>
            <source>Context of these rows: up to {0} of memory.</source>
            <translation>这些行的上下文：最多占用 {0} 内存。</translation>
        </message>
        <message>
            <source>Rows are answered one at a time</source>
            <translation>逐行回答</translation>
        </message>
        <message>
            <source>{0} rows share each load of a layer's weights</source>
            <translation>每加载一层权重，由 {0} 行共用</translation>
        </message>
        <message>
            <source>Measured {2} tokens/s, slower than the {0} to {1} predicted: other programs may be busy, or rows longer than the first ones. The time left is based on the measured rate.</source>
            <translation>实测 {2} token/秒，慢于预测的 {0} 至 {1}：可能其他程序正忙，或各行比最初几行更长。剩余时间按实测速度计算。</translation>
        </message>
        <message>
            <source>Measured {2} tokens/s, faster than the {0} to {1} predicted. The time left is based on the measured rate.</source>
            <translation>实测 {2} token/秒，快于预测的 {0} 至 {1}。剩余时间按实测速度计算。</translation>
        </message>
        <message>
            <source>Expected: {0} to {1} tokens/s.</source>
            <translation>预计：{0} 至 {1} token/秒。</translation>
        </message>
        <message>
            <source>Limited by CPU compute.</source>
            <translation>受限于 CPU 算力。</translation>
        </message>
        <message>
            <source>Limited by reading weights from RAM.</source>
            <translation>受限于从内存读取权重。</translation>
        </message>
        <message>
            <source>Limited by attention on the CPU.</source>
            <translation>受限于 CPU 上的注意力计算。</translation>
        </message>
        <message>
            <source>Limited by reading experts from disk.</source>
            <translation>受限于从磁盘读取专家。</translation>
        </message>
        <message>
            <source>Limited by the link to the card.</source>
            <translation>受限于与显卡的连接。</translation>
        </message>
        <message>
            <source>Limited by GPU compute.</source>
            <translation>受限于 GPU 算力。</translation>
        </message>
        <message>
            <source>running</source>
            <translation>运行中</translation>
        </message>
        <message>
            <source>waiting</source>
            <translation>等待中</translation>
        </message>
        <message>
            <source>waiting, place {0}</source>
            <translation>等待中，第 {0} 位</translation>
        </message>
        <message>
            <source>stopping</source>
            <translation>正在停止</translation>
        </message>
        <message>
            <source>paused</source>
            <translation>已暂停</translation>
        </message>
        <message>
            <source>stopped</source>
            <translation>已停止</translation>
        </message>
        <message>
            <source>done</source>
            <translation>完成</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>失败</translation>
        </message>
        <message>
            <source>runs elsewhere</source>
            <translation>在别处运行</translation>
        </message>
        <message>
            <source>1 row done</source>
            <translation>已完成 1 行</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows done</source>
            <translation>
                <numerusform>已完成 {0} 行</numerusform>
            </translation>
        </message>
        <message numerus="yes">
            <source>{0} of {1} rows</source>
            <translation>
                <numerusform>{0} / {1} 行</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} failed</source>
            <translation>{0} 失败</translation>
        </message>
        <message>
            <source>{0} cut off</source>
            <translation>{0} 被截断</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} token/秒</translation>
        </message>
        <message>
            <source>done by {0} at the latest</source>
            <translation>最迟 {0} 完成</translation>
        </message>
        <message>
            <source>Shares the engine with your chat until the answer is complete.</source>
            <translation>在回答完成之前与对话共用引擎。</translation>
        </message>
        <message>
            <source>Reading the file…</source>
            <translation>正在读取文件…</translation>
        </message>
        <message>
            <source>Starts when the engine is ready.</source>
            <translation>引擎就绪后开始。</translation>
        </message>
        <message>
            <source>Starts when a job before it is done and a model is loaded.</source>
            <translation>前面的任务完成且模型已加载后开始。</translation>
        </message>
        <message>
            <source>Saving finished rows…</source>
            <translation>正在保存已完成的行…</translation>
        </message>
        <message>
            <source>Finishing the current layer and saving finished rows…</source>
            <translation>正在完成当前层并保存已完成的行…</translation>
        </message>
        <message>
            <source>Another program is working on this job, such as “switchyard batch”.</source>
            <translation>另一个程序正在处理此任务，例如“switchyard batch”。</translation>
        </message>
        <message>
            <source>All rows are in {0}.</source>
            <translation>所有行都在 {0} 中。</translation>
        </message>
        <message>
            <source>{0} says why rows failed.</source>
            <translation>{0} 说明了各行失败的原因。</translation>
        </message>
        <message>
            <source>Column “problem” says why rows failed.</source>
            <translation>“problem”列说明了各行失败的原因。</translation>
        </message>
        <message>
            <source>Stopped: the answered rows are in {0}.</source>
            <translation>已停止：已回答的行在 {0} 中。</translation>
        </message>
        <message>
            <source>Resume continues where it stopped.</source>
            <translation>“继续”会从停下的地方接着运行。</translation>
        </message>
        <message>
            <source>{0} min {1} s</source>
            <translation>{0} 分 {1} 秒</translation>
        </message>
        <message>
            <source>{0} tokens in {1}, {2} tokens/s.</source>
            <translation>{1} 内 {0} 个 token，{2} token/秒。</translation>
        </message>
        <message>
            <source>{0} s</source>
            <translation>{0} 秒</translation>
        </message>
        <message>
            <source>Connecting to the Ray cluster…</source>
            <translation>正在连接 Ray 集群…</translation>
        </message>
        <message>
            <source>Asking the servers which models they have…</source>
            <translation>正在询问各服务器有哪些模型…</translation>
        </message>
        <message>
            <source>Rows are sent to {0}.</source>
            <translation>各行发送到 {0}。</translation>
        </message>
        <message>
            <source>Rows are sent to {0} on this PC; no text leaves it.</source>
            <translation>各行发送到这台电脑上的 {0}；文本不会离开本机。</translation>
        </message>
        <message>
            <source> and to </source>
            <translation>、</translation>
        </message>
        <message>
            <source>Chats go first on this PC.</source>
            <translation>在这台电脑上，对话优先。</translation>
        </message>
        <message>
            <source>This PC answers your chat first.</source>
            <translation>这台电脑先回答您的对话。</translation>
        </message>
        <message>
            <source>The first rows are being answered.</source>
            <translation>正在回答最初几行。</translation>
        </message>
        <message>
            <source>Another job shares the engine.</source>
            <translation>另有一个任务共用引擎。</translation>
        </message>
        <message>
            <source>{0} other jobs share the engine.</source>
            <translation>另有 {0} 个任务共用引擎。</translation>
        </message>
        <message>
            <source>Chats go on beside it.</source>
            <translation>对话可同时进行。</translation>
        </message>
        <message>
            <source>complete</source>
            <translation>完整</translation>
        </message>
        <message>
            <source>cut off</source>
            <translation>被截断</translation>
        </message>
        <message>
            <source>context full</source>
            <translation>上下文已满</translation>
        </message>
        <message>
            <source>No text leaves this PC.</source>
            <translation>文本不会离开这台电脑。</translation>
        </message>
        <message>
            <source>The rows are sent to a server on this PC; no text leaves it.</source>
            <translation>各行发送到这台电脑上的服务器；文本不会离开本机。</translation>
        </message>
        <message>
            <source>The text of every row may be sent to {0}.</source>
            <translation>每行的文本都可能发送到 {0}。</translation>
        </message>
        <message>
            <source>that this PC belongs to</source>
            <translation>（这台电脑所属的）</translation>
        </message>
        <message>
            <source>at {0}</source>
            <translation>（{0}）</translation>
        </message>
        <message>
            <source>The text of every row is sent to the nodes of the Ray cluster {0}.</source>
            <translation>每行的文本都会发送到 Ray 集群 {0} 的节点。</translation>
        </message>
        <message>
            <source>This PC</source>
            <translation>这台电脑</translation>
        </message>
        <message>
            <source>Not asked: {0}</source>
            <translation>未询问：{0}</translation>
        </message>
        <message>
            <source>Paused, and asked again later: {0}</source>
            <translation>暂歇，稍后再次询问：{0}</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows at once</source>
            <translation>
                <numerusform>同时 {0} 行</numerusform>
            </translation>
        </message>
        <message>
            <source>1 row at once</source>
            <translation>同时 1 行</translation>
        </message>
        <message numerus="yes">
            <source>Measured there on {0} rows: {1} s for a row, {2} tokens read and {3} written.</source>
            <translation>
                <numerusform>在那里测了 {0} 行：每行 {1} 秒，读取 {2} 个 token，生成 {3} 个。</numerusform>
            </translation>
        </message>
        <message>
            <source>All rows take {0} min at most; asked at once, they take less.</source>
            <translation>全部行最多需要 {0} 分钟；同时询问会更快。</translation>
        </message>
        <message>
            <source>They cost about {0}.</source>
            <translation>费用约为 {0}。</translation>
        </message>
        <message>
            <source>{0} row took {1} s, at {2} tokens/s.</source>
            <translation>{0} 行用时 {1} 秒，{2} token/秒。</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows took {1} s, at {2} tokens/s.</source>
            <translation>
                <numerusform>{0} 行用时 {1} 秒，{2} token/秒。</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>BatchHead</name>
        <message>
            <source>Batch</source>
            <translation>批处理</translation>
        </message>
        <message>
            <source>Retry failed</source>
            <translation>重试失败的行</translation>
        </message>
        <message>
            <source>Pause</source>
            <translation>暂停</translation>
        </message>
        <message>
            <source>Resume</source>
            <translation>继续</translation>
        </message>
        <message>
            <source>Open result</source>
            <translation>打开结果</translation>
        </message>
        <message>
            <source>More</source>
            <translation>更多</translation>
        </message>
        <message>
            <source>New job</source>
            <translation>新建任务</translation>
        </message>
        <message>
            <source>Show in folder</source>
            <translation>在文件夹中显示</translation>
        </message>
        <message>
            <source>Stop and keep answers</source>
            <translation>停止并保留回答</translation>
        </message>
        <message>
            <source>Start over…</source>
            <translation>从头开始…</translation>
        </message>
        <message>
            <source>Move up in queue</source>
            <translation>在队列中上移</translation>
        </message>
        <message>
            <source>Move down in queue</source>
            <translation>在队列中下移</translation>
        </message>
        <message>
            <source>Remove from list</source>
            <translation>从列表中移除</translation>
        </message>
        <message>
            <source>From a file…</source>
            <translation>从文件…</translation>
        </message>
        <message>
            <source>From a folder…</source>
            <translation>从文件夹…</translation>
        </message>
    </context>
    <context>
        <name>BatchHint</name>
        <message>
            <source>Show job</source>
            <translation>显示任务</translation>
        </message>
        <message>
            <source>The engine stopped, so the batch job is paused; no answered row is lost.</source>
            <translation>引擎已停止，批处理任务已暂停；已回答的行没有丢失。</translation>
        </message>
        <message>
            <source>The batch job{0} shares the engine with your chat: both are slower until the answer is complete.</source>
            <translation>批处理任务{0}与您的对话共用引擎：在回答完成之前两者都会变慢。</translation>
        </message>
        <message>
            <source>A batch job is running{0}. Your chats share the engine with it and come first.</source>
            <translation>有批处理任务正在运行{0}。您的对话与其共用引擎，并且优先。</translation>
        </message>
    </context>
    <context>
        <name>BatchJobs</name>
        <message>
            <source>Switchyard was closed before the job started.</source>
            <translation>任务开始之前 Switchyard 已关闭。</translation>
        </message>
        <message>
            <source>Switchyard was closed while the job ran; no answered row is lost.</source>
            <translation>任务运行期间 Switchyard 已关闭；已回答的行没有丢失。</translation>
        </message>
        <message>
            <source>The engine was needed for something else, such as another model; no answered row is lost.</source>
            <translation>引擎被用于其他用途，例如另一个模型；已回答的行没有丢失。</translation>
        </message>
        <message>
            <source>The list of jobs could not be saved ({0}).</source>
            <translation>无法保存任务列表（{0}）。</translation>
        </message>
    </context>
    <context>
        <name>BatchPage</name>
        <message>
            <source>Batch</source>
            <translation>批处理</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>关闭</translation>
        </message>
        <message>
            <source>Your chat's prompt is ready: choose the file whose rows it is to be asked of.</source>
            <translation>对话的提示词已就绪：请选择要逐行提问的文件。</translation>
        </message>
        <message>
            <source>{0} has an unsupported file type: use txt, md, csv, tsv, jsonl, parquet, xlsx, pdf, docx or html, or a folder of such files.</source>
            <translation>不支持 {0} 的文件类型：请使用 txt、md、csv、tsv、jsonl、parquet、xlsx、pdf、docx 或 html，或包含这些文件的文件夹。</translation>
        </message>
        <message numerus="yes">
            <source>{0} more after this one</source>
            <translation>
                <numerusform>之后还有 {0} 个</numerusform>
            </translation>
        </message>
        <message>
            <source>Another job is writing {0}: choose another result file.</source>
            <translation>另一个任务正在写入 {0}：请选择其他结果文件。</translation>
        </message>
        <message>
            <source>{0} already exists.</source>
            <translation>{0} 已存在。</translation>
        </message>
        <message>
            <source>Replacing it deletes the answers in it. To keep them, choose another name.</source>
            <translation>替换会删除其中的回答。若要保留，请选择其他名称。</translation>
        </message>
        <message>
            <source>Replace it</source>
            <translation>替换</translation>
        </message>
        <message>
            <source>Back</source>
            <translation>返回</translation>
        </message>
        <message>
            <source>Pause the job before you remove it from the list.</source>
            <translation>请先暂停任务，再将其从列表中移除。</translation>
        </message>
        <message>
            <source>{0} was removed from the list; its result file stays.</source>
            <translation>{0} 已从列表中移除；其结果文件仍保留。</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>撤销</translation>
        </message>
        <message>
            <source>Start this job over?</source>
            <translation>要从头开始此任务吗？</translation>
        </message>
        <message>
            <source>Its answers are deleted, and its result file is replaced when it is done.</source>
            <translation>其回答将被删除，完成后会替换结果文件。</translation>
        </message>
        <message>
            <source>Start over</source>
            <translation>从头开始</translation>
        </message>
        <message>
            <source>1 row was</source>
            <translation>1 行</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows were</source>
            <translation>
                <numerusform>{0} 行</numerusform>
            </translation>
        </message>
        <message>
            <source>This job began with {0}; now {1} is loaded.</source>
            <translation>此任务最初使用 {0}；现在加载的是 {1}。</translation>
        </message>
        <message>
            <source>{0} answered with the first. Load it to resume; chats then use it too. Starting over deletes those answers.</source>
            <translation>{0}已由最初的模型回答。加载该模型即可继续；对话也会使用它。从头开始会删除这些回答。</translation>
        </message>
        <message>
            <source>Load it and resume</source>
            <translation>加载并继续</translation>
        </message>
        <message>
            <source>{0} does not exist yet: it is written when the job is done, paused or stopped.</source>
            <translation>{0} 尚不存在：任务完成、暂停或停止时才会写入。</translation>
        </message>
        <message>
            <source>Choose a file of prompts</source>
            <translation>选择提示词文件</translation>
        </message>
        <message>
            <source>Folder of prompts</source>
            <translation>提示词文件夹</translation>
        </message>
    </context>
    <context>
        <name>Cache</name>
        <message>
            <source>random</source>
            <translation>随机</translation>
        </message>
        <message>
            <source>static popularity</source>
            <translation>固定热度</translation>
        </message>
        <message>
            <source>Evicts the least recently used expert.</source>
            <translation>淘汰最久未使用的专家。</translation>
        </message>
        <message>
            <source>Evicts the least frequently used expert.</source>
            <translation>淘汰使用频率最低的专家。</translation>
        </message>
        <message>
            <source>Evicts an expert that is used rarely and not recently.</source>
            <translation>淘汰使用较少且近期未用的专家。</translation>
        </message>
        <message>
            <source>Evicts the oldest expert.</source>
            <translation>淘汰最早的专家。</translation>
        </message>
        <message>
            <source>Evicts a random expert.</source>
            <translation>随机淘汰一个专家。</translation>
        </message>
        <message>
            <source>Keeps the most popular experts.</source>
            <translation>保留最热门的专家。</translation>
        </message>
        <message>
            <source>previous token</source>
            <translation>上一个 token</translation>
        </message>
        <message>
            <source>next layer's gate</source>
            <translation>下一层的门控</translation>
        </message>
        <message>
            <source>correlation table</source>
            <translation>相关性表</translation>
        </message>
        <message>
            <source>trained network</source>
            <translation>训练过的网络</translation>
        </message>
    </context>
    <context>
        <name>CacheCard</name>
        <message>
            <source>Cache</source>
            <translation>缓存</translation>
        </message>
        <message>
            <source>Expert cache</source>
            <translation>专家缓存</translation>
        </message>
        <message>
            <source>The cache keeps the most used experts where they can be reached fastest. A hit is an expert that was already there when it was needed; a miss has to be copied from slower memory first, or computed there.</source>
            <translation>缓存把最常用的专家放在能最快取用的地方。需要时已在其中即为命中；未命中则须先从较慢的存储复制过来，或就地计算。</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>显存</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>内存</translation>
        </message>
        <message>
            <source>Show this tier's size</source>
            <translation>显示这一级的大小</translation>
        </message>
        <message>
            <source>nothing to cache</source>
            <translation>没有可缓存的内容</translation>
        </message>
        <message>
            <source>policy {0}, adopted</source>
            <translation>策略 {0}，已采用</translation>
        </message>
        <message>
            <source>policy {0}</source>
            <translation>策略 {0}</translation>
        </message>
        <message>
            <source>Chosen while running, by each policy's hit rate</source>
            <translation>运行时按各策略的命中率选择</translation>
        </message>
        <message>
            <source>Here a miss costs no more than a hit, so another size would not be faster.</source>
            <translation>这里未命中的代价不高于命中，改变大小不会更快。</translation>
        </message>
        <message>
            <source>Load a model with experts to see its hit rate and the effect of other cache sizes.</source>
            <translation>加载带专家的模型，即可查看其命中率以及其他缓存大小的效果。</translation>
        </message>
        <message>
            <source>All experts are in the graphics card's memory: every one is a hit, and nothing is cached.</source>
            <translation>所有专家都在显存中：每次都命中，无需缓存。</translation>
        </message>
        <message>
            <source>All experts are in RAM and computed by the CPU, so there is nothing to cache.</source>
            <translation>所有专家都在内存中并由 CPU 计算，没有可缓存的内容。</translation>
        </message>
        <message>
            <source>This model has no experts, so there is nothing to cache.</source>
            <translation>此模型没有专家，没有可缓存的内容。</translation>
        </message>
    </context>
    <context>
        <name>CallRow</name>
        <message>
            <source>The model wants to call {0}.</source>
            <translation>模型想要调用 {0}。</translation>
        </message>
        <message>
            <source>The model wants to call {0} of the server {1}.</source>
            <translation>模型想要调用服务器 {1} 的 {0}。</translation>
        </message>
        <message>
            <source>Allow once</source>
            <translation>允许一次</translation>
        </message>
        <message>
            <source>Allow in this chat</source>
            <translation>在此对话中允许</translation>
        </message>
        <message>
            <source>Always allow</source>
            <translation>始终允许</translation>
        </message>
        <message>
            <source>Deny</source>
            <translation>拒绝</translation>
        </message>
        <message>
            <source>Fold the call</source>
            <translation>折叠调用</translation>
        </message>
        <message>
            <source>Show arguments and result</source>
            <translation>显示参数和结果</translation>
        </message>
        <message>
            <source>unfolded</source>
            <translation>已展开</translation>
        </message>
        <message>
            <source>folded</source>
            <translation>已折叠</translation>
        </message>
        <message>
            <source>Arguments</source>
            <translation>参数</translation>
        </message>
        <message>
            <source>Result</source>
            <translation>结果</translation>
        </message>
    </context>
    <context>
        <name>Catalogue</name>
        <message>
            <source>Strong at reasoning, mathematics and code, with very long documents; for machines with a lot of memory.</source>
            <translation>擅长推理、数学和代码，可处理很长的文档；适合内存充足的机器。</translation>
        </message>
        <message>
            <source>English, Chinese and many others</source>
            <translation>英语、中文等多种语言</translation>
        </message>
        <message>
            <source>Reasons step by step before it answers: good at mathematics, code and using tools.</source>
            <translation>回答前逐步推理：擅长数学、代码和使用工具。</translation>
        </message>
        <message>
            <source>English, and others less well</source>
            <translation>英语，其他语言稍差</translation>
        </message>
        <message>
            <source>The strongest all-round model for machines with 96 GB or more: knowledge, code and long documents.</source>
            <translation>适合 96 GB 及以上机器的最强通用模型：知识、代码和长文档。</translation>
        </message>
        <message>
            <source>over 100 languages</source>
            <translation>100 多种语言</translation>
        </message>
        <message>
            <source>Even-tempered chat, writing and code in European languages, with long documents.</source>
            <translation>以欧洲语言进行平稳的对话、写作和编程，可处理长文档。</translation>
        </message>
        <message>
            <source>English, French, German, Spanish, Italian and others</source>
            <translation>英语、法语、德语、西班牙语、意大利语等</translation>
        </message>
        <message>
            <source>Good at writing code over many steps and at using tools; can think before it answers.</source>
            <translation>擅长多步骤编写代码和使用工具；可在回答前思考。</translation>
        </message>
        <message>
            <source>English and Chinese</source>
            <translation>英语和中文</translation>
        </message>
        <message>
            <source>Much knowledge for its speed; answers directly, and keeps its pace with very long texts.</source>
            <translation>速度快且知识丰富；直接回答，处理很长的文本时也不变慢。</translation>
        </message>
        <message>
            <source>The best all-round choice for PCs with 32 GB: chat, code, reasoning and long documents.</source>
            <translation>32 GB 电脑的最佳通用之选：对话、代码、推理和长文档。</translation>
        </message>
        <message>
            <source>Natural writing in very many languages, general knowledge and summaries.</source>
            <translation>以很多语言自然写作，常识和总结。</translation>
        </message>
        <message>
            <source>over 140 languages</source>
            <translation>140 多种语言</translation>
        </message>
        <message>
            <source>Reasons before it answers; good at mathematics, science and following instructions exactly.</source>
            <translation>先推理再回答；擅长数学、科学和准确遵循指令。</translation>
        </message>
        <message>
            <source>English, and five others less well</source>
            <translation>英语，另五种语言稍差</translation>
        </message>
        <message>
            <source>Writes code over many steps and uses tools well for its size.</source>
            <translation>以其大小而言，能多步骤编写代码并善用工具。</translation>
        </message>
        <message>
            <source>Reasons step by step and is quick: good at mathematics and code on PCs with 16 GB.</source>
            <translation>逐步推理且速度快：在 16 GB 电脑上擅长数学和代码。</translation>
        </message>
        <message>
            <source>Made for programming: writes, explains and changes code in many languages.</source>
            <translation>专为编程打造：以多种语言编写、解释和修改代码。</translation>
        </message>
        <message>
            <source>A quick all-rounder that answers directly: chat, translation, summaries.</source>
            <translation>直接回答的快速通用模型：对话、翻译、总结。</translation>
        </message>
        <message>
            <source>Careful writing in European languages; uses every weight for every token, so it wants a large graphics card.</source>
            <translation>以欧洲语言细致写作；每个 token 都用到全部权重，因此需要大显存显卡。</translation>
        </message>
        <message>
            <source>Follows instructions and fills in forms and JSON reliably; little memory for long texts.</source>
            <translation>可靠地遵循指令并填写表单和 JSON；对长文本的记忆较弱。</translation>
        </message>
        <message>
            <source>English, German, Spanish, French, Japanese and seven others</source>
            <translation>英语、德语、西班牙语、法语、日语及另外七种</translation>
        </message>
        <message>
            <source>General knowledge and writing in Chinese and English at good speed.</source>
            <translation>以中文和英语写作并具备常识，速度良好。</translation>
        </message>
        <message>
            <source>Chinese and English</source>
            <translation>中文和英语</translation>
        </message>
        <message>
            <source>Pleasant writing in many languages; for graphics cards with 12 GB.</source>
            <translation>以多种语言流畅写作；适合 12 GB 显卡。</translation>
        </message>
        <message>
            <source>A solid small model that can think before it answers; for graphics cards with 8 GB.</source>
            <translation>可在回答前思考的扎实小模型；适合 8 GB 显卡。</translation>
        </message>
        <message>
            <source>An older model, known from many papers: good for comparisons.</source>
            <translation>许多论文中用过的较早模型：适合用来比较。</translation>
        </message>
        <message>
            <source>English, French, German, Spanish, Italian</source>
            <translation>英语、法语、德语、西班牙语、意大利语</translation>
        </message>
        <message>
            <source>Reasoning and mathematics from textbook-like training; an older model.</source>
            <translation>来自教科书式训练的推理和数学能力；较早的模型。</translation>
        </message>
        <message>
            <source>English and 22 others</source>
            <translation>英语及另外 22 种</translation>
        </message>
        <message>
            <source>Very quick even without a graphics card: summaries, extraction, simple chat.</source>
            <translation>没有显卡也很快：总结、提取、简单对话。</translation>
        </message>
        <message>
            <source>English, Chinese, German, Spanish, French, Japanese and others</source>
            <translation>英语、中文、德语、西班牙语、法语、日语等</translation>
        </message>
        <message>
            <source>Small and quick: forms, JSON, summaries and tools on old laptops.</source>
            <translation>小巧快速：在旧笔记本上处理表单、JSON、总结和工具。</translation>
        </message>
        <message>
            <source>Surprisingly able for its size; for small graphics cards and long texts.</source>
            <translation>以其大小而言能力惊人；适合小显存显卡和长文本。</translation>
        </message>
        <message>
            <source>Small, with a good sense for numbers and instructions.</source>
            <translation>小巧，善于处理数字和指令。</translation>
        </message>
        <message>
            <source>Small and open in every respect: weights, data and recipe.</source>
            <translation>小巧且完全开放：权重、数据和方法。</translation>
        </message>
        <message>
            <source>English, French, Spanish, German, Italian, Portuguese</source>
            <translation>英语、法语、西班牙语、德语、意大利语、葡萄牙语</translation>
        </message>
        <message>
            <source>Open in every respect, and very quick; short texts only.</source>
            <translation>完全开放且非常快；仅适合短文本。</translation>
        </message>
        <message>
            <source>English</source>
            <translation>英语</translation>
        </message>
    </context>
    <context>
        <name>Chat</name>
        <message>
            <source>The model wrote no summary: leave the oldest turns out, or try another model.</source>
            <translation>模型没有写出总结：请略去最早的消息，或换一个模型。</translation>
        </message>
        <message>
            <source>Attach a folder</source>
            <translation>附加文件夹</translation>
        </message>
        <message>
            <source>Pictures ({0})</source>
            <translation>图片 ({0})</translation>
        </message>
        <message>
            <source>All files (*)</source>
            <translation>所有文件 (*)</translation>
        </message>
        <message>
            <source>Attach files</source>
            <translation>附加文件</translation>
        </message>
        <message>
            <source>Markdown and JSON of every chat (*.zip)</source>
            <translation>所有对话的 Markdown 和 JSON (*.zip)</translation>
        </message>
        <message>
            <source>Markdown, as shown (*.md)</source>
            <translation>Markdown，与显示一致 (*.md)</translation>
        </message>
        <message>
            <source>PDF, as shown (*.pdf)</source>
            <translation>PDF，与显示一致 (*.pdf)</translation>
        </message>
        <message>
            <source>Web page, as shown (*.html)</source>
            <translation>网页，与显示一致 (*.html)</translation>
        </message>
        <message>
            <source>JSON, with all versions and branches (*.json)</source>
            <translation>JSON，含所有版本和分支 (*.json)</translation>
        </message>
        <message>
            <source>Switchyard chats</source>
            <translation>Switchyard 对话</translation>
        </message>
        <message>
            <source>Export</source>
            <translation>导出</translation>
        </message>
        <message>
            <source>Chats of Switchyard, ChatGPT and LM Studio (*.zip *.json *.md *.markdown)</source>
            <translation>Switchyard、ChatGPT 和 LM Studio 的对话 (*.zip *.json *.md *.markdown)</translation>
        </message>
        <message>
            <source>Import chats</source>
            <translation>导入对话</translation>
        </message>
        <message>
            <source>The import was cancelled; what was imported until then stays.</source>
            <translation>导入已取消；此前导入的内容仍保留。</translation>
        </message>
        <message>
            <source>1 chat</source>
            <translation>1 个对话</translation>
        </message>
        <message numerus="yes">
            <source>{0} chats</source>
            <translation>
                <numerusform>{0} 个对话</numerusform>
            </translation>
        </message>
        <message>
            <source>1 that was here has new messages.</source>
            <translation>其中 1 个已有的对话有新消息。</translation>
        </message>
        <message numerus="yes">
            <source>{0} that were here have new messages.</source>
            <translation>
                <numerusform>其中 {0} 个已有的对话有新消息。</numerusform>
            </translation>
        </message>
        <message>
            <source>1 was already here and is unchanged.</source>
            <translation>1 个已存在，保持不变。</translation>
        </message>
        <message numerus="yes">
            <source>{0} were already here and are unchanged.</source>
            <translation>
                <numerusform>{0} 个已存在，保持不变。</numerusform>
            </translation>
        </message>
        <message>
            <source>1 chat is damaged and could not be read.</source>
            <translation>1 个对话已损坏，无法读取。</translation>
        </message>
        <message numerus="yes">
            <source>{0} chats are damaged and could not be read.</source>
            <translation>
                <numerusform>{0} 个对话已损坏，无法读取。</numerusform>
            </translation>
        </message>
        <message>
            <source>The file ends in the middle: what comes after that is not in it.</source>
            <translation>文件在中途结束：后面的内容不在其中。</translation>
        </message>
        <message>
            <source>Left out: {0}.</source>
            <translation>已略过：{0}。</translation>
        </message>
        <message>
            <source>{0} was not imported: {1}.</source>
            <translation>{0} 未导入：{1}。</translation>
        </message>
        <message numerus="yes">
            <source>Neither were {0} other files.</source>
            <translation>
                <numerusform>另有 {0} 个文件也未导入。</numerusform>
            </translation>
        </message>
        <message>
            <source>Imported: {0}.</source>
            <translation>已导入：{0}。</translation>
        </message>
        <message>
            <source>tool calls ({0})</source>
            <translation>工具调用（{0}）</translation>
        </message>
        <message>
            <source>pictures ({0})</source>
            <translation>图片（{0}）</translation>
        </message>
        <message>
            <source>attached files ({0})</source>
            <translation>附件（{0}）</translation>
        </message>
        <message>
            <source>settings of single chats ({0})</source>
            <translation>个别对话的设置（{0}）</translation>
        </message>
        <message>
            <source>chats without messages ({0})</source>
            <translation>没有消息的对话（{0}）</translation>
        </message>
        <message>
            <source>parts of an unknown kind ({0})</source>
            <translation>未知类型的部分（{0}）</translation>
        </message>
        <message>
            <source>New chat</source>
            <translation>新对话</translation>
        </message>
        <message>
            <source>Scratch chat</source>
            <translation>临时对话</translation>
        </message>
        <message>
            <source>Scratch, not stored</source>
            <translation>临时，不保存</translation>
        </message>
        <message>
            <source>Folders</source>
            <translation>文件夹</translation>
        </message>
        <message>
            <source>Pinned</source>
            <translation>已置顶</translation>
        </message>
        <message>
            <source>Today</source>
            <translation>今天</translation>
        </message>
        <message>
            <source>Yesterday</source>
            <translation>昨天</translation>
        </message>
        <message>
            <source>Previous 7 days</source>
            <translation>过去 7 天</translation>
        </message>
        <message>
            <source>Older</source>
            <translation>更早</translation>
        </message>
        <message>
            <source>Found</source>
            <translation>搜索结果</translation>
        </message>
        <message>
            <source>Fold earlier turns</source>
            <translation>总结较早的消息</translation>
        </message>
        <message>
            <source>The model summarises them, and reads the summary instead.</source>
            <translation>模型会进行总结，之后改读总结。</translation>
        </message>
        <message>
            <source>Leave out the oldest</source>
            <translation>略去最早的消息</translation>
        </message>
        <message>
            <source>The model reads nothing of them; they are kept.</source>
            <translation>模型不会读取这些内容；它们会被保留。</translation>
        </message>
        <message>
            <source>Ask in a new chat</source>
            <translation>在新对话中提问</translation>
        </message>
        <message>
            <source>Send anyway</source>
            <translation>仍然发送</translation>
        </message>
        <message>
            <source>Not now</source>
            <translation>暂不</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>取消</translation>
        </message>
        <message>
            <source>The earlier turns were not folded: {0}</source>
            <translation>较早的消息未能总结：{0}</translation>
        </message>
        <message>
            <source>Delete its chat, too</source>
            <translation>同时删除其中的对话</translation>
        </message>
        <message numerus="yes">
            <source>Delete its {0} chats, too</source>
            <translation>
                <numerusform>同时删除其中的 {0} 个对话</numerusform>
            </translation>
        </message>
        <message>
            <source>Delete the folder “{0}”?</source>
            <translation>要删除文件夹“{0}”吗？</translation>
        </message>
        <message>
            <source>Its chats can stay, outside of any folder. Either way you can undo it.</source>
            <translation>其中的对话可以保留在文件夹之外。两种方式都可以撤销。</translation>
        </message>
        <message>
            <source>Delete only the folder</source>
            <translation>仅删除文件夹</translation>
        </message>
        <message>
            <source>The folder “{0}” was deleted.</source>
            <translation>已删除文件夹“{0}”。</translation>
        </message>
        <message>
            <source>New folder</source>
            <translation>新建文件夹</translation>
        </message>
        <message>
            <source>New folder {0}</source>
            <translation>新建文件夹 {0}</translation>
        </message>
        <message>
            <source>The message was deleted.</source>
            <translation>消息已删除。</translation>
        </message>
        <message>
            <source>The message was changed.</source>
            <translation>消息已修改。</translation>
        </message>
        <message>
            <source>Earlier turns are folded into a summary.</source>
            <translation>较早的消息已总结。</translation>
        </message>
        <message>
            <source>The oldest turns are left out of what the model reads.</source>
            <translation>最早的消息不再由模型读取。</translation>
        </message>
        <message>
            <source>The turns are sent as they are again.</source>
            <translation>这些消息将重新原样发送。</translation>
        </message>
        <message>
            <source>The summary was changed.</source>
            <translation>总结已修改。</translation>
        </message>
        <message>
            <source>An answer is being written here: wait for it, or stop it first.</source>
            <translation>这里正在生成回答：请等待完成，或先停止。</translation>
        </message>
        <message>
            <source>waiting for the engine, which is not running</source>
            <translation>正在等待引擎（未运行）</translation>
        </message>
        <message>
            <source>waiting for a model: none is loaded</source>
            <translation>正在等待模型（未加载）</translation>
        </message>
        <message>
            <source>waiting for the model to load</source>
            <translation>正在等待模型加载</translation>
        </message>
        <message>
            <source>searching the documents</source>
            <translation>正在查阅文档</translation>
        </message>
        <message>
            <source>starting the servers with the tools</source>
            <translation>正在启动工具服务器</translation>
        </message>
        <message>
            <source>waiting for you to allow a call</source>
            <translation>正在等待您允许调用</translation>
        </message>
        <message>
            <source>waiting for a tool</source>
            <translation>正在等待工具</translation>
        </message>
        <message>
            <source>waiting for another answer</source>
            <translation>正在等待另一个回答</translation>
        </message>
        <message>
            <source>waiting for the first token from the other server</source>
            <translation>正在等待另一台服务器的首个 token</translation>
        </message>
        <message>
            <source>reading the prompt</source>
            <translation>正在读取提示词</translation>
        </message>
        <message>
            <source>thinking</source>
            <translation>思考中</translation>
        </message>
        <message>
            <source>writing</source>
            <translation>生成中</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} token/秒</translation>
        </message>
        <message>
            <source>first token {0} s</source>
            <translation>首个 token {0} 秒</translation>
        </message>
        <message>
            <source>1 token</source>
            <translation>1 个 token</translation>
        </message>
        <message numerus="yes">
            <source>{0} tokens</source>
            <translation>
                <numerusform>{0} 个 token</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} of {1} drafted tokens accepted</source>
            <translation>{1} 个草拟 token 中采纳 {0} 个</translation>
        </message>
        <message>
            <source>reached the limit</source>
            <translation>已达上限</translation>
        </message>
        <message>
            <source>the context is full</source>
            <translation>上下文已满</translation>
        </message>
        <message>
            <source>edited</source>
            <translation>已编辑</translation>
        </message>
        <message>
            <source>stopped</source>
            <translation>已停止</translation>
        </message>
        <message>
            <source>picture read before</source>
            <translation>图片先前已读取</translation>
        </message>
        <message>
            <source>picture read in {0} s</source>
            <translation>图片读取用时 {0} 秒</translation>
        </message>
        <message>
            <source>{0} pictures read in {1} s</source>
            <translation>{0} 张图片读取用时 {1} 秒</translation>
        </message>
        <message>
            <source>{0} pictures read before</source>
            <translation>{0} 张图片先前已读取</translation>
        </message>
        <message>
            <source>{0} of {1} pictures read before, the others in {2} s</source>
            <translation>{1} 张图片中 {0} 张先前已读取，其余用时 {2} 秒</translation>
        </message>
        <message>
            <source>Thinking… {0}</source>
            <translation>思考中… {0}</translation>
        </message>
        <message>
            <source>Thought</source>
            <translation>思考</translation>
        </message>
        <message>
            <source>Thought for {0}</source>
            <translation>思考了 {0}</translation>
        </message>
        <message>
            <source>The answer is incomplete.</source>
            <translation>回答不完整。</translation>
        </message>
        <message>
            <source>The text so far is kept.</source>
            <translation>已生成的文本会保留。</translation>
        </message>
        <message>
            <source>Your message is kept: make room, edit it, or start a new chat.</source>
            <translation>您的消息已保留：请腾出空间、编辑消息或开始新对话。</translation>
        </message>
        <message>
            <source>The context was full before the answer began: make room, and ask again.</source>
            <translation>回答开始前上下文已满：请腾出空间后再次提问。</translation>
        </message>
        <message>
            <source>It was still thinking when it reached the limit: raise Max tokens, or let it think less.</source>
            <translation>到达上限时模型仍在思考：请提高“token 上限”，或减少思考。</translation>
        </message>
        <message>
            <source>The answer ran into the end of the context: make room, and let it continue.</source>
            <translation>回答到达上下文末尾：请腾出空间后让其继续。</translation>
        </message>
        <message>
            <source>{0} tokens of context</source>
            <translation>{0} 个 token 的上下文</translation>
        </message>
        <message>
            <source>for new chats</source>
            <translation>用于新对话</translation>
        </message>
        <message>
            <source>sees pictures</source>
            <translation>能看图片</translation>
        </message>
        <message>
            <source>default</source>
            <translation>默认</translation>
        </message>
        <message>
            <source>loaded</source>
            <translation>已加载</translation>
        </message>
        <message>
            <source>measured</source>
            <translation>实测</translation>
        </message>
        <message>
            <source>predicted</source>
            <translation>预测</translation>
        </message>
        <message>
            <source>The only model there</source>
            <translation>那里唯一的模型</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>入门模型</translation>
        </message>
        <message>
            <source>Sent to {0}, another program on this PC</source>
            <translation>发送到 {0}（这台电脑上的另一个程序）</translation>
        </message>
        <message>
            <source>Sent to {0}</source>
            <translation>发送到 {0}</translation>
        </message>
        <message>
            <source>{0}: what you write in this chat stays on this PC.</source>
            <translation>{0}：您在此对话中写的内容留在这台电脑上。</translation>
        </message>
        <message>
            <source>{0}: what you write in this chat leaves this PC.</source>
            <translation>{0}：您在此对话中写的内容会离开这台电脑。</translation>
        </message>
        <message>
            <source>top-k</source>
            <translation>top-k</translation>
        </message>
        <message>
            <source>min-p</source>
            <translation>min-p</translation>
        </message>
        <message>
            <source>the repetition penalty</source>
            <translation>重复惩罚</translation>
        </message>
        <message>
            <source>loop guard</source>
            <translation>防循环</translation>
        </message>
        <message>
            <source>beam search</source>
            <translation>束搜索</translation>
        </message>
        <message>
            <source>how much to think</source>
            <translation>思考程度</translation>
        </message>
        <message>
            <source>It does not take this chat's {0}.</source>
            <translation>此对话的以下设置不会生效：{0}。</translation>
        </message>
        <message>
            <source>{0} of {1} reads text only: choose another model to send pictures.</source>
            <translation>{1} 的 {0} 只读取文本：要发送图片，请选择其他模型。</translation>
        </message>
        <message>
            <source>The model</source>
            <translation>模型</translation>
        </message>
        <message>
            <source>{0} reads text only.</source>
            <translation>{0} 只能读取文本。</translation>
        </message>
        <message>
            <source>No model on this PC sees pictures.</source>
            <translation>这台电脑上没有能看图片的模型。</translation>
        </message>
        <message>
            <source>{0} and {1} more</source>
            <translation>{0} 等另外 {1} 个</translation>
        </message>
        <message>
            <source>On this PC these see pictures: {0}.</source>
            <translation>这台电脑上能看图片的模型：{0}。</translation>
        </message>
        <message>
            <source>Your message has about {0} tokens; the model reads {1}. Shorten it.</source>
            <translation>您的消息约有 {0} 个 token；模型可读取 {1} 个。请缩短消息。</translation>
        </message>
        <message>
            <source>With your message this chat has about {0} tokens; the model reads {1}. Make room, or ask in a new chat.</source>
            <translation>加上这条消息，此对话约有 {0} 个 token；模型可读取 {1} 个。请腾出空间，或在新对话中提问。</translation>
        </message>
        <message>
            <source>With your message this chat has about {0} tokens; the model reads {1}. Ask in a new chat.</source>
            <translation>加上这条消息，此对话约有 {0} 个 token；模型可读取 {1} 个。请在新对话中提问。</translation>
        </message>
        <message>
            <source>This chat takes {0} of the {1} tokens the model reads. Make room before it is full.</source>
            <translation>此对话已占用模型可读取的 {1} 个 token 中的 {0} 个。请在占满之前腾出空间。</translation>
        </message>
        <message>
            <source>The context is full: {0} of {1} tokens are taken. Make room, or ask in a new chat.</source>
            <translation>上下文已满：{1} 个 token 中已占用 {0} 个。请腾出空间，或在新对话中提问。</translation>
        </message>
        <message>
            <source>The earlier turns are summarised once the model is idle.</source>
            <translation>模型空闲后会总结较早的消息。</translation>
        </message>
        <message>
            <source>Summarising the earlier turns… {0}. Your messages come first.</source>
            <translation>正在总结较早的消息… {0}。您的消息优先。</translation>
        </message>
        <message>
            <source>Reading… {0}</source>
            <translation>正在读取… {0}</translation>
        </message>
        <message>
            <source>Reading…</source>
            <translation>正在读取…</translation>
        </message>
        <message>
            <source>folder</source>
            <translation>文件夹</translation>
        </message>
        <message>
            <source>file</source>
            <translation>文件</translation>
        </message>
        <message>
            <source>This {0} {1}.</source>
            <translation>{0}：{1}。</translation>
        </message>
        <message>
            <source>Not read yet</source>
            <translation>尚未读取</translation>
        </message>
        <message>
            <source>1 file</source>
            <translation>1 个文件</translation>
        </message>
        <message numerus="yes">
            <source>{0} files</source>
            <translation>
                <numerusform>{0} 个文件</numerusform>
            </translation>
        </message>
        <message>
            <source>1 page</source>
            <translation>1 页</translation>
        </message>
        <message numerus="yes">
            <source>{0} pages</source>
            <translation>
                <numerusform>{0} 页</numerusform>
            </translation>
        </message>
        <message>
            <source>about {0} tokens</source>
            <translation>约 {0} 个 token</translation>
        </message>
        <message>
            <source>goes to {0}</source>
            <translation>发送到 {0}</translation>
        </message>
        <message>
            <source>page {0}</source>
            <translation>第 {0} 页</translation>
        </message>
        <message>
            <source>There was no room for {0} beside this chat: ask in a new chat, or shorten this one.</source>
            <translation>此对话中没有空间容纳 {0}：请在新对话中提问，或缩短此对话。</translation>
        </message>
        <message>
            <source>The documents could not be searched ({0}), so the answer is given without them.</source>
            <translation>无法查阅文档（{0}）：将在没有文档的情况下回答。</translation>
        </message>
        <message>
            <source>It reads text only: the pictures in this chat are not sent.</source>
            <translation>该模型只读取文本：此对话中的图片不会发送。</translation>
        </message>
        <message>
            <source>This model reads text only: the pictures in this chat are not read.</source>
            <translation>此模型只能读取文本：不会读取此对话中的图片。</translation>
        </message>
        <message>
            <source>The server {0} is no longer in the list, and nothing else answers here: choose a model for this chat.</source>
            <translation>服务器 {0} 已不在列表中，这里没有其他模型回答：请为此对话选择模型。</translation>
        </message>
        <message>
            <source>1 thread</source>
            <translation>1 个线程</translation>
        </message>
        <message numerus="yes">
            <source>{0} threads</source>
            <translation>
                <numerusform>{0} 个线程</numerusform>
            </translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>Chat</source>
            <translation>对话</translation>
        </message>
        <message>
            <source>Please continue.</source>
            <translation>请继续。</translation>
        </message>
        <message>
            <source>Branch: {0}</source>
            <translation>分支：{0}</translation>
        </message>
        <message>
            <source>Picture</source>
            <translation>图片</translation>
        </message>
        <message>
            <source>Custom</source>
            <translation>自定义</translation>
        </message>
        <message>
            <source>Precise</source>
            <translation>精确</translation>
        </message>
        <message>
            <source>Balanced</source>
            <translation>平衡</translation>
        </message>
        <message>
            <source>Creative</source>
            <translation>创意</translation>
        </message>
        <message>
            <source>{0} beams</source>
            <translation>{0} 束</translation>
        </message>
        <message>
            <source>always the likeliest token</source>
            <translation>始终取概率最高的 token</translation>
        </message>
        <message>
            <source>temperature {0}</source>
            <translation>温度 {0}</translation>
        </message>
        <message>
            <source>top-k {0}</source>
            <translation>top-k {0}</translation>
        </message>
        <message>
            <source>top-p {0}</source>
            <translation>top-p {0}</translation>
        </message>
        <message>
            <source>min-p {0}</source>
            <translation>min-p {0}</translation>
        </message>
        <message>
            <source>repetition penalty {0}</source>
            <translation>重复惩罚 {0}</translation>
        </message>
        <message>
            <source>presence penalty {0}</source>
            <translation>存在惩罚 {0}</translation>
        </message>
        <message>
            <source>frequency penalty {0}</source>
            <translation>频率惩罚 {0}</translation>
        </message>
        <message>
            <source>loop guard {0}</source>
            <translation>防循环 {0}</translation>
        </message>
        <message>
            <source>thinking {0}</source>
            <translation>思考 {0}</translation>
        </message>
    </context>
    <context>
        <name>ChatDocument</name>
        <message>
            <source>Chat</source>
            <translation>对话</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>系统提示词</translation>
        </message>
        <message>
            <source>nothing could be written there</source>
            <translation>那里无法写入</translation>
        </message>
        <message>
            <source>Assistant</source>
            <translation>助手</translation>
        </message>
        <message>
            <source>You</source>
            <translation>您</translation>
        </message>
        <message>
            <source>Thoughts</source>
            <translation>思考</translation>
        </message>
        <message>
            <source>picture</source>
            <translation>图片</translation>
        </message>
    </context>
    <context>
        <name>ChatFiles</name>
        <message>
            <source>The export was cancelled; no file was written.</source>
            <translation>导出已取消；未写入任何文件。</translation>
        </message>
        <message>
            <source>Chat</source>
            <translation>对话</translation>
        </message>
    </context>
    <context>
        <name>ChatStore</name>
        <message>
            <source>The chats in {path} were written by a newer Switchyard and are not changed. Chats made now are lost when the window closes: update Switchyard first.</source>
            <translation>{path} 中的对话由更新版本的 Switchyard 写入，不会被更改。现在的对话在窗口关闭后会丢失：请先更新 Switchyard。</translation>
        </message>
        <message>
            <source>{folder} is read-only, so you can read your chats but not save new ones: what you write now is lost when the window closes. Make the folder writable and restart Switchyard.</source>
            <translation>{folder} 为只读：您可以阅读对话，但无法保存新内容，现在写的内容在窗口关闭后会丢失。请将该文件夹设为可写并重启 Switchyard。</translation>
        </message>
        <message>
            <source>The chat database was damaged. Recovered chats: {conversations}, messages: {messages}; messages lost: {lost}. The damaged file is kept as {path}.</source>
            <translation>对话数据库已损坏。已恢复对话：{conversations}，消息：{messages}；丢失消息：{lost}。损坏的文件保留为 {path}。</translation>
        </message>
        <message>
            <source>The chat database was damaged and has been repaired (chats: {conversations}, messages: {messages}); no message seems to be missing. The damaged file is kept as {path}.</source>
            <translation>对话数据库曾损坏，已修复（对话：{conversations}，消息：{messages}）；似乎没有丢失消息。损坏的文件保留为 {path}。</translation>
        </message>
        <message>
            <source>The chat database was damaged and no message could be read from it. The damaged file is kept as {path}.</source>
            <translation>对话数据库已损坏，无法从中读取任何消息。损坏的文件保留为 {path}。</translation>
        </message>
        <message>
            <source>The disk is full, so new text is not saved: free some space on the disk of {folder}.</source>
            <translation>磁盘已满，新文本未保存：请在 {folder} 所在的磁盘上腾出空间。</translation>
        </message>
        <message>
            <source>Another program is using the chats in {folder}, so new text is not saved: close it.</source>
            <translation>另一个程序正在使用 {folder} 中的对话，新文本未保存：请关闭该程序。</translation>
        </message>
        <message>
            <source>Chats cannot be saved in {folder} ({why}): check that it can be written to.</source>
            <translation>无法在 {folder} 中保存对话（{why}）：请检查是否可以写入。</translation>
        </message>
        <message>
            <source>Switchyard closed during this answer.</source>
            <translation>生成此回答期间 Switchyard 已关闭。</translation>
        </message>
    </context>
    <context>
        <name>ChatTransfer</name>
        <message>
            <source>Cancel</source>
            <translation>取消</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>关闭</translation>
        </message>
        <message>
            <source>Writing {0}…</source>
            <translation>正在写入 {0}…</translation>
        </message>
        <message numerus="yes">
            <source>{0} files</source>
            <translation>
                <numerusform>{0} 个文件</numerusform>
            </translation>
        </message>
        <message>
            <source>Importing {0}…</source>
            <translation>正在导入 {0}…</translation>
        </message>
        <message>
            <source>{0} {1}, {2} chats so far</source>
            <translation>{0} {1}，目前 {2} 个对话</translation>
        </message>
        <message>
            <source>Written to {0}</source>
            <translation>已保存到 {0}</translation>
        </message>
    </context>
    <context>
        <name>ChatView</name>
        <message>
            <source>Dismiss</source>
            <translation>关闭</translation>
        </message>
        <message>
            <source>Keep this chat</source>
            <translation>保留此对话</translation>
        </message>
        <message>
            <source>Close for good</source>
            <translation>永久关闭</translation>
        </message>
        <message>
            <source>The starter is a small demo model: it gets facts wrong and may repeat itself.</source>
            <translation>入门模型是一个小型演示模型：可能弄错事实，也可能重复。</translation>
        </message>
        <message>
            <source>New chat</source>
            <translation>新对话</translation>
        </message>
        <message>
            <source>Find in this chat</source>
            <translation>在此对话中查找</translation>
        </message>
        <message>
            <source>Next match</source>
            <translation>下一处匹配</translation>
        </message>
        <message>
            <source>Previous match</source>
            <translation>上一处匹配</translation>
        </message>
        <message>
            <source>New scratch chat, which is never stored</source>
            <translation>新建临时对话（不会保存）</translation>
        </message>
        <message>
            <source>Search chats</source>
            <translation>搜索对话</translation>
        </message>
        <message>
            <source>Choose the model</source>
            <translation>选择模型</translation>
        </message>
        <message>
            <source>Rename chat</source>
            <translation>重命名对话</translation>
        </message>
        <message>
            <source>Stop the answer</source>
            <translation>停止回答</translation>
        </message>
        <message>
            <source>Undo the last deletion or change of a chat</source>
            <translation>撤销对对话的上次删除或修改</translation>
        </message>
        <message>
            <source>Previous chat</source>
            <translation>上一个对话</translation>
        </message>
        <message>
            <source>Next chat</source>
            <translation>下一个对话</translation>
        </message>
        <message>
            <source>Attach files</source>
            <translation>附加文件</translation>
        </message>
        <message>
            <source>Print the chat</source>
            <translation>打印对话</translation>
        </message>
        <message>
            <source>Ask two, side by side</source>
            <translation>同时询问两个</translation>
        </message>
        <message>
            <source>Write a message</source>
            <translation>撰写消息</translation>
        </message>
        <message>
            <source>Enter</source>
            <translation>Enter</translation>
        </message>
        <message>
            <source>Send</source>
            <translation>发送</translation>
        </message>
        <message>
            <source>Shift+Enter</source>
            <translation>Shift+Enter</translation>
        </message>
        <message>
            <source>Start a new line</source>
            <translation>换行</translation>
        </message>
        <message>
            <source>The whole chat goes there, now and with each further message: your messages, their pictures and what is read of their documents, the answers and the system prompt. What happens with it is up to who runs that server.</source>
            <translation>整个对话都会发送到那里，包括此后的每条消息：您的消息、其中的图片和从文档中读取的内容、回答以及系统提示词。如何处理由该服务器的运营者决定。</translation>
        </message>
        <message>
            <source>The way there is not encrypted: others in the network can read it.</source>
            <translation>传输未加密：网络中的其他人可能读到内容。</translation>
        </message>
        <message>
            <source>Send this chat to {0}?</source>
            <translation>要将此对话发送到 {0} 吗？</translation>
        </message>
        <message>
            <source>Send it there</source>
            <translation>发送</translation>
        </message>
        <message>
            <source>A scratch chat is never stored: to print it, keep it first.</source>
            <translation>临时对话不会保存：要打印，请先保留。</translation>
        </message>
        <message>
            <source>Scratch chat: nothing of it is stored, and it is gone once it is closed.</source>
            <translation>临时对话：不保存任何内容，关闭后即消失。</translation>
        </message>
        <message>
            <source>Undo  Ctrl+Z</source>
            <translation>撤销  Ctrl+Z</translation>
        </message>
        <message>
            <source>The scratch chat is gone.</source>
            <translation>临时对话已消失。</translation>
        </message>
        <message>
            <source>“{0}” was deleted.</source>
            <translation>已删除“{0}”。</translation>
        </message>
        <message>
            <source>The model is loading{0}. You can write now; the answer follows.</source>
            <translation>正在加载模型{0}。您现在就可以输入；回答随后出现。</translation>
        </message>
        <message>
            <source>No model is loaded. You can write now; the answer follows once one is loaded.</source>
            <translation>未加载模型。您现在就可以输入；加载模型后会给出回答。</translation>
        </message>
        <message>
            <source>{0} runs on this machine; nothing you write leaves it.</source>
            <translation>{0} 在本机运行；您写的内容不会离开本机。</translation>
        </message>
    </context>
    <context>
        <name>Column</name>
        <message>
            <source>First</source>
            <translation>第一个</translation>
        </message>
        <message>
            <source>Second</source>
            <translation>第二个</translation>
        </message>
        <message>
            <source>{0}: model</source>
            <translation>{0}：模型</translation>
        </message>
        <message>
            <source>{0}: sampling</source>
            <translation>{0}：采样</translation>
        </message>
        <message>
            <source>{0} answer</source>
            <translation>{0}回答</translation>
        </message>
        <message>
            <source>Go on with this</source>
            <translation>用这个继续</translation>
        </message>
        <message>
            <source>Go on with the {0} answer</source>
            <translation>用{0}回答继续</translation>
        </message>
    </context>
    <context>
        <name>Comparison</name>
        <message>
            <source>One model is open at a time on this PC: this answer comes second.</source>
            <translation>这台电脑一次只打开一个模型：此回答排在第二。</translation>
        </message>
        <message>
            <source>The model is loading; its answer follows.</source>
            <translation>正在加载模型；其回答随后出现。</translation>
        </message>
        <message>
            <source>The model was not loaded, so there is no answer from it.</source>
            <translation>模型未能加载，因此没有其回答。</translation>
        </message>
    </context>
    <context>
        <name>Composer</name>
        <message>
            <source>Message Switchyard…</source>
            <translation>给 Switchyard 发消息…</translation>
        </message>
        <message>
            <source>Message</source>
            <translation>消息</translation>
        </message>
        <message>
            <source>Enter sends, Shift+Enter starts a new line</source>
            <translation>Enter 发送，Shift+Enter 换行</translation>
        </message>
        <message>
            <source>Attach files or a folder</source>
            <translation>附加文件或文件夹</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>系统提示词</translation>
        </message>
        <message>
            <source>Instructions the model reads first</source>
            <translation>模型最先读取的指令</translation>
        </message>
        <message>
            <source>The model may call tools in this chat</source>
            <translation>模型可以在此对话中调用工具</translation>
        </message>
        <message>
            <source>Let the model call tools</source>
            <translation>让模型调用工具</translation>
        </message>
        <message>
            <source>Sampling: {0}</source>
            <translation>采样：{0}</translation>
        </message>
        <message>
            <source>How the next token is chosen: {0}</source>
            <translation>如何选择下一个 token：{0}</translation>
        </message>
        <message>
            <source>Files…</source>
            <translation>文件…</translation>
        </message>
        <message>
            <source>Folder…</source>
            <translation>文件夹…</translation>
        </message>
        <message>
            <source>System</source>
            <translation>系统</translation>
        </message>
        <message>
            <source>Stop  Esc</source>
            <translation>停止  Esc</translation>
        </message>
        <message>
            <source>Send</source>
            <translation>发送</translation>
        </message>
        <message>
            <source>Stop the answer</source>
            <translation>停止回答</translation>
        </message>
    </context>
    <context>
        <name>ComputingCard</name>
        <message>
            <source>Time it</source>
            <translation>测速</translation>
        </message>
        <message>
            <source>Loads the model with these settings, has it write a little, and measures that</source>
            <translation>用这些设置加载模型，让其生成少量内容并测速</translation>
        </message>
        <message>
            <source>Reload model</source>
            <translation>重新加载模型</translation>
        </message>
        <message>
            <source>Changes apply at the next start, or now with these buttons.</source>
            <translation>更改在下次启动时生效，也可用这些按钮立即生效。</translation>
        </message>
        <message>
            <source>Loading the model and timing it…</source>
            <translation>正在加载模型并测速…</translation>
        </message>
        <message>
            <source>{0}: {1} tokens/s, measured just now</source>
            <translation>{0}：{1} token/秒，刚刚实测</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>入门模型</translation>
        </message>
        <message>
            <source>No graphics card computes here.</source>
            <translation>这里没有显卡参与计算。</translation>
        </message>
        <message>
            <source>{0}: {1} tokens/s, measured</source>
            <translation>{0}：{1} token/秒，实测</translation>
        </message>
        <message>
            <source>{0}: about {1} tokens/s, {2} to {3}</source>
            <translation>{0}：约 {1} token/秒，{2} 至 {3}</translation>
        </message>
    </context>
    <context>
        <name>ContextMeter</name>
        <message>
            <source>Context</source>
            <translation>上下文</translation>
        </message>
        <message>
            <source>Estimate, including your draft; the engine counts with the next answer.</source>
            <translation>估计值，包含您的草稿；引擎会在下次回答时计数。</translation>
        </message>
        <message>
            <source>Counted by the engine after the last answer.</source>
            <translation>由引擎在上次回答后计数。</translation>
        </message>
        <message>
            <source>Click to see and change the length.</source>
            <translation>点击可查看和更改长度。</translation>
        </message>
        <message>
            <source>context {0} of {1}</source>
            <translation>上下文 {0} / {1}</translation>
        </message>
        <message>
            <source>context about {0} of {1}</source>
            <translation>上下文约 {0} / {1}</translation>
        </message>
        <message>
            <source>context filling up: {0} of {1}</source>
            <translation>上下文渐满：{0} / {1}</translation>
        </message>
        <message>
            <source>context filling up: about {0} of {1}</source>
            <translation>上下文渐满：约 {0} / {1}</translation>
        </message>
        <message>
            <source>context almost full: {0} of {1}</source>
            <translation>上下文将满：{0} / {1}</translation>
        </message>
        <message>
            <source>context almost full: about {0} of {1}</source>
            <translation>上下文将满：约 {0} / {1}</translation>
        </message>
        <message>
            <source>context exceeded: {0} of {1}</source>
            <translation>上下文超出：{0} / {1}</translation>
        </message>
        <message>
            <source>context exceeded: about {0} of {1}</source>
            <translation>上下文超出：约 {0} / {1}</translation>
        </message>
    </context>
    <context>
        <name>ContextPopover</name>
        <message>
            <source>Context</source>
            <translation>上下文</translation>
        </message>
        <message>
            <source>Length of the context, in steps</source>
            <translation>上下文长度（分级）</translation>
        </message>
        <message>
            <source> tokens</source>
            <translation> token</translation>
        </message>
        <message>
            <source>Length of the context</source>
            <translation>上下文长度</translation>
        </message>
        <message>
            <source>Reload model</source>
            <translation>重新加载模型</translation>
        </message>
        <message>
            <source>Fold earlier turns into a summary</source>
            <translation>总结较早的消息</translation>
        </message>
        <message>
            <source>Leave out the oldest turns</source>
            <translation>略去最早的消息</translation>
        </message>
        <message>
            <source>Length</source>
            <translation>长度</translation>
        </message>
        <message>
            <source>About {0} of {1} tokens are used ({2}).</source>
            <translation>{1} 个 token 中约用 {0} 个（{2}）。</translation>
        </message>
        <message>
            <source>{0} of {1} tokens used ({2}).</source>
            <translation>{1} 个 token 中已用 {0} 个（{2}）。</translation>
        </message>
        <message>
            <source>There is no earlier answer to fold yet.</source>
            <translation>还没有可总结的较早回答。</translation>
        </message>
        <message>
            <source>The length is set by {0}.</source>
            <translation>长度由 {0} 设定。</translation>
        </message>
        <message>
            <source>Keys and values of {0} tokens take {1} of {2} ({3} each).</source>
            <translation>{0} 个 token 的键值占用 {2} 中的 {1}（每个 {3}）。</translation>
        </message>
        <message>
            <source>That is more than is free now ({0}).</source>
            <translation>这超过了当前的空闲空间（{0}）。</translation>
        </message>
        <message>
            <source>The model is loaded with {0} tokens: the change needs it loaded again.</source>
            <translation>模型以 {0} 个 token 加载：更改后需要重新加载。</translation>
        </message>
    </context>
    <context>
        <name>ConversationDelegate</name>
        <message>
            <source>New title</source>
            <translation>新标题</translation>
        </message>
    </context>
    <context>
        <name>ConversationPanel</name>
        <message>
            <source>Search chats</source>
            <translation>搜索对话</translation>
        </message>
        <message>
            <source>Folders, scratch chats, import and export</source>
            <translation>文件夹、临时对话、导入和导出</translation>
        </message>
        <message>
            <source>More for chats</source>
            <translation>对话的更多操作</translation>
        </message>
        <message>
            <source>Chats</source>
            <translation>对话</translation>
        </message>
        <message>
            <source>No chat contains these words.</source>
            <translation>没有包含这些词的对话。</translation>
        </message>
        <message>
            <source>Rename	F2</source>
            <translation>重命名	F2</translation>
        </message>
        <message>
            <source>Close for good	Del</source>
            <translation>永久关闭	Del</translation>
        </message>
        <message>
            <source>Unpin</source>
            <translation>取消置顶</translation>
        </message>
        <message>
            <source>Pin to the top</source>
            <translation>置顶</translation>
        </message>
        <message>
            <source>Export…</source>
            <translation>导出…</translation>
        </message>
        <message>
            <source>Print…</source>
            <translation>打印…</translation>
        </message>
        <message>
            <source>Delete	Del</source>
            <translation>删除	Del</translation>
        </message>
        <message>
            <source>Move to folder</source>
            <translation>移到文件夹</translation>
        </message>
        <message>
            <source>No folder</source>
            <translation>无文件夹</translation>
        </message>
        <message>
            <source>New folder…</source>
            <translation>新建文件夹…</translation>
        </message>
        <message>
            <source>Collapse</source>
            <translation>折叠</translation>
        </message>
        <message>
            <source>Expand</source>
            <translation>展开</translation>
        </message>
        <message>
            <source>Delete…	Del</source>
            <translation>删除…	Del</translation>
        </message>
        <message>
            <source>New folder</source>
            <translation>新建文件夹</translation>
        </message>
        <message>
            <source>New scratch chat	Ctrl+Shift+N</source>
            <translation>新建临时对话	Ctrl+Shift+N</translation>
        </message>
        <message>
            <source>Import chats…</source>
            <translation>导入对话…</translation>
        </message>
        <message>
            <source>Export chat…</source>
            <translation>导出对话…</translation>
        </message>
        <message>
            <source>Print chat…</source>
            <translation>打印对话…</translation>
        </message>
        <message>
            <source>Export all chats…</source>
            <translation>导出所有对话…</translation>
        </message>
    </context>
    <context>
        <name>CopyButton</name>
        <message>
            <source>Copied</source>
            <translation>已复制</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>复制</translation>
        </message>
        <message>
            <source>Copy code</source>
            <translation>复制代码</translation>
        </message>
    </context>
    <context>
        <name>CoreGrid</name>
        <message>
            <source>{0} CPUs, {1}% busy on average; busiest: number {2} with {3}%</source>
            <translation>{0} 个 CPU，平均占用 {1}%；最忙的是第 {2} 个，{3}%</translation>
        </message>
        <message>
            <source>CPU {0}: {1}% busy</source>
            <translation>CPU {0}：占用 {1}%</translation>
        </message>
    </context>
    <context>
        <name>DataCard</name>
        <message>
            <source>Data</source>
            <translation>数据</translation>
        </message>
        <message>
            <source>Open folder</source>
            <translation>打开文件夹</translation>
        </message>
        <message>
            <source>Change…</source>
            <translation>更改…</translation>
        </message>
        <message>
            <source>Data folder</source>
            <translation>数据文件夹</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>撤销</translation>
        </message>
        <message>
            <source>Folder for chats and models</source>
            <translation>存放对话和模型的文件夹</translation>
        </message>
        <message>
            <source>Copy your chats and models to {0}?</source>
            <translation>要将对话和模型复制到 {0} 吗？</translation>
        </message>
        <message>
            <source>They are copied at the next start. The current folder stays until you delete it.</source>
            <translation>下次启动时复制。当前文件夹会保留，直到您将其删除。</translation>
        </message>
        <message>
            <source>Copy them</source>
            <translation>复制</translation>
        </message>
        <message>
            <source>Start empty</source>
            <translation>从空白开始</translation>
        </message>
        <message>
            <source>At the next start your chats and models are copied to {0}, which is then used.</source>
            <translation>下次启动时，您的对话和模型会复制到 {0}，此后使用该文件夹。</translation>
        </message>
        <message>
            <source>The data in {0} is used from the next start.</source>
            <translation>从下次启动起使用 {0} 中的数据。</translation>
        </message>
    </context>
    <context>
        <name>DataFolder</name>
        <message>
            <source>{0} is inside the current data folder; choose a folder outside it.</source>
            <translation>{0} 位于当前数据文件夹内；请选择其外的文件夹。</translation>
        </message>
        <message>
            <source>{0} cannot be written to ({1}); choose another folder.</source>
            <translation>无法写入 {0}（{1}）；请选择其他文件夹。</translation>
        </message>
        <message>
            <source>The data could not be copied to {0} ({1}); {2} stays in use.</source>
            <translation>无法将数据复制到 {0}（{1}）；继续使用 {2}。</translation>
        </message>
        <message>
            <source>{0} has {1} free, but {2} are to be copied; {3} stays in use.</source>
            <translation>{0} 有 {1} 空闲，但需要复制 {2}；继续使用 {3}。</translation>
        </message>
    </context>
    <context>
        <name>DataFolderStart</name>
        <message>
            <source>Copying chats and models to {0}…</source>
            <translation>正在将对话和模型复制到 {0}…</translation>
        </message>
        <message>
            <source>Keep the current folder</source>
            <translation>保留当前文件夹</translation>
        </message>
        <message>
            <source>The data folder could not be changed.</source>
            <translation>无法更改数据文件夹。</translation>
        </message>
        <message>
            <source>The data folder {0} is missing.</source>
            <translation>找不到数据文件夹 {0}。</translation>
        </message>
        <message>
            <source>Plug in its drive and try again, or continue with the default folder {0}.</source>
            <translation>请连接其所在的驱动器后重试，或改用默认文件夹 {0}。</translation>
        </message>
        <message>
            <source>Try again</source>
            <translation>重试</translation>
        </message>
        <message>
            <source>Use the default folder</source>
            <translation>使用默认文件夹</translation>
        </message>
        <message>
            <source>Quit</source>
            <translation>退出</translation>
        </message>
        <message>
            <source>Switchyard is already open with the data folder {0}, but does not respond. End it, in the system's task manager if necessary, and start again.</source>
            <translation>Switchyard 已使用数据文件夹 {0} 打开，但没有响应。请将其结束（必要时使用任务管理器），然后重新启动。</translation>
        </message>
        <message>
            <source>The data folder {0} cannot be written to; check its permissions and free space, then start again.</source>
            <translation>无法写入数据文件夹 {0}；请检查权限和可用空间，然后重新启动。</translation>
        </message>
        <message>
            <source>{0} is not a file, and Switchyard keeps one there: move it away, then start again.</source>
            <translation>{0} 不是文件，而 Switchyard 需要在那里存放文件：请将其移走，然后重新启动。</translation>
        </message>
    </context>
    <context>
        <name>Diagnosis</name>
        <message>
            <source>The report could not be written to {0}: choose another folder.</source>
            <translation>无法将报告写入 {0}：请选择其他文件夹。</translation>
        </message>
    </context>
    <context>
        <name>Downloads</name>
        <message>
            <source>Downloads could not be started: reinstall Switchyard.</source>
            <translation>无法开始下载：请重新安装 Switchyard。</translation>
        </message>
        <message>
            <source>The downloads stopped and could not be started again; try Resume.</source>
            <translation>下载已停止且无法重新开始；请尝试“继续”。</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} / {1}</translation>
        </message>
        <message>
            <source>connecting</source>
            <translation>正在连接</translation>
        </message>
        <message>
            <source>{0} left</source>
            <translation>剩余 {0}</translation>
        </message>
        <message>
            <source>waits for its turn</source>
            <translation>等待中</translation>
        </message>
        <message>
            <source>paused</source>
            <translation>已暂停</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>失败</translation>
        </message>
        <message>
            <source>done</source>
            <translation>完成</translation>
        </message>
        <message>
            <source>{0} that are already here are deleted. To keep them, pause it instead.</source>
            <translation>已下载的 {0} 将被删除。若要保留，请改为暂停。</translation>
        </message>
        <message>
            <source>Cancel the download of {0}?</source>
            <translation>要取消下载 {0} 吗？</translation>
        </message>
        <message>
            <source>Cancel the download</source>
            <translation>取消下载</translation>
        </message>
        <message>
            <source>Keep it</source>
            <translation>保留</translation>
        </message>
    </context>
    <context>
        <name>DownloadsCard</name>
        <message>
            <source>Downloads</source>
            <translation>下载</translation>
        </message>
        <message>
            <source>Speed limit</source>
            <translation>限速</translation>
        </message>
        <message>
            <source>at most {0}</source>
            <translation>最多 {0}</translation>
        </message>
        <message>
            <source>no speed limit</source>
            <translation>不限速</translation>
        </message>
        <message>
            <source>Pause</source>
            <translation>暂停</translation>
        </message>
        <message>
            <source>Resume</source>
            <translation>继续</translation>
        </message>
        <message>
            <source>Access token…</source>
            <translation>访问令牌…</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>取消</translation>
        </message>
        <message>
            <source>Earlier (Alt+Up)</source>
            <translation>提前 (Alt+↑)</translation>
        </message>
        <message>
            <source>Later (Alt+Down)</source>
            <translation>推后 (Alt+↓)</translation>
        </message>
    </context>
    <context>
        <name>DownloadsMark</name>
        <message>
            <source>Downloads</source>
            <translation>下载</translation>
        </message>
        <message>
            <source>1 download, {0}%</source>
            <translation>1 项下载，{0}%</translation>
        </message>
        <message numerus="yes">
            <source>{0} downloads, {1}%</source>
            <translation>
                <numerusform>{0} 项下载，{1}%</numerusform>
            </translation>
        </message>
        <message>
            <source>A download stopped</source>
            <translation>有一项下载已停止</translation>
        </message>
        <message>
            <source>{0}: show them</source>
            <translation>{0}：查看</translation>
        </message>
    </context>
    <context>
        <name>DownloadsView</name>
        <message>
            <source>Downloads</source>
            <translation>下载</translation>
        </message>
        <message>
            <source>Pause or resume the download</source>
            <translation>暂停或继续下载</translation>
        </message>
        <message>
            <source>Download it earlier</source>
            <translation>提前下载</translation>
        </message>
        <message>
            <source>Download it later</source>
            <translation>推后下载</translation>
        </message>
        <message>
            <source>Cancel the download</source>
            <translation>取消下载</translation>
        </message>
    </context>
    <context>
        <name>EmptyBatch</name>
        <message>
            <source>Every row is answered, many at a time. The result file keeps the input's columns.</source>
            <translation>每一行都会得到回答，并且多行同时进行。结果文件保留输入的各列。</translation>
        </message>
        <message>
            <source>Accepted: csv, tsv, jsonl, parquet, xlsx, txt, md, pdf, docx and html, a folder of such files, and OpenAI batch files.</source>
            <translation>支持 csv、tsv、jsonl、parquet、xlsx、txt、md、pdf、docx 和 html，包含这些文件的文件夹，以及 OpenAI 批处理文件。</translation>
        </message>
        <message>
            <source>Choose a file…</source>
            <translation>选择文件…</translation>
        </message>
        <message>
            <source>Choose a folder…</source>
            <translation>选择文件夹…</translation>
        </message>
        <message>
            <source>Drop a file of prompts here</source>
            <translation>将提示词文件拖放到这里</translation>
        </message>
    </context>
    <context>
        <name>EmptyChat</name>
        <message>
            <source>Ask something to begin</source>
            <translation>提个问题吧</translation>
        </message>
        <message>
            <source>Choose a model</source>
            <translation>选择模型</translation>
        </message>
        <message>
            <source>What is the capital of France? Answer in one sentence.</source>
            <translation>法国的首都是哪里？请用一句话回答。</translation>
        </message>
        <message>
            <source>Write one sentence about the sea.</source>
            <translation>写一句关于大海的话。</translation>
        </message>
        <message>
            <source>Why should we drink water? Answer in one sentence.</source>
            <translation>我们为什么要喝水？请用一句话回答。</translation>
        </message>
        <message>
            <source>Why do people like music? Answer in one sentence.</source>
            <translation>人们为什么喜欢音乐？请用一句话回答。</translation>
        </message>
    </context>
    <context>
        <name>Engine</name>
        <message>
            <source>The graphics card limits the speed: it is busy {0} of the time, reading at {1} GB/s.</source>
            <translation>速度受限于显卡：其 {0} 的时间处于忙碌，读取速度 {1} GB/s。</translation>
        </message>
        <message>
            <source>The CPU limits the speed.</source>
            <translation>速度受限于 CPU。</translation>
        </message>
        <message>
            <source>Reading {0} from RAM limits the speed: the CPU is busy {1} of the time, at {2} GB/s.</source>
            <translation>速度受限于从内存读取（{0}）：CPU {1} 的时间处于忙碌，{2} GB/s。</translation>
        </message>
        <message>
            <source>The link to the card limits the speed: it is busy {0} of the time, at {1} GB/s.</source>
            <translation>速度受限于与显卡的连接：其 {0} 的时间处于忙碌，{1} GB/s。</translation>
        </message>
        <message>
            <source>CPU arithmetic limits the speed: the CPU is busy {0} of the time, and computing experts takes longer than reading them from RAM.</source>
            <translation>速度受限于 CPU 运算：CPU {0} 的时间处于忙碌，计算专家比从内存读取更耗时。</translation>
        </message>
        <message>
            <source>Launching many small operations on the card limits the speed: {0} ms of the {1} ms per token.</source>
            <translation>速度受限于在显卡上启动许多小操作：每 token {1} ms 中占 {0} ms。</translation>
        </message>
        <message>
            <source>Layers are read for each token: rows of a file share that, and gain most.</source>
            <translation>每个 token 都要读取各层：同一文件的各行共用读取，获益最大。</translation>
        </message>
        <message>
            <source>No single change of memory, link, disk or precision would make a noticeable difference.</source>
            <translation>单独更改内存、连接、磁盘或精度都不会有明显差别。</translation>
        </message>
        <message>
            <source>{0} would help most: {1} tokens/s, {2} times as fast with the prompt included.</source>
            <translation>最有帮助的是：{0}。{1} token/秒，计入提示词为 {2} 倍速度。</translation>
        </message>
        <message>
            <source>{0} would help most: {1} tokens/s, about {2} times as fast.</source>
            <translation>最有帮助的是：{0}。{1} token/秒，约 {2} 倍速度。</translation>
        </message>
        <message>
            <source>{0} GB of RAM</source>
            <translation>{0} GB 内存</translation>
        </message>
        <message>
            <source>A card with {0} GB</source>
            <translation>{0} GB 的显卡</translation>
        </message>
        <message>
            <source>A link to the card that is twice as fast</source>
            <translation>快一倍的显卡连接</translation>
        </message>
        <message>
            <source>A disk that is twice as fast</source>
            <translation>快一倍的磁盘</translation>
        </message>
        <message>
            <source>RAM that is twice as fast</source>
            <translation>快一倍的内存</translation>
        </message>
        <message>
            <source>All {0} threads</source>
            <translation>全部 {0} 个线程</translation>
        </message>
        <message>
            <source>expert weights</source>
            <translation>专家权重</translation>
        </message>
        <message>
            <source>as stored ({0}-bit)</source>
            <translation>按原样（{0} 位）</translation>
        </message>
        <message>
            <source>as stored ({0}-bit and {1}-bit)</source>
            <translation>按原样（{0} 位和 {1} 位）</translation>
        </message>
        <message>
            <source>as stored ({0}-bit, {1}-bit and {2}-bit)</source>
            <translation>按原样（{0}、{1} 和 {2} 位）</translation>
        </message>
        <message>
            <source>Switchyard mixed</source>
            <translation>Switchyard 混合</translation>
        </message>
        <message>
            <source>Switchyard mixed, static</source>
            <translation>Switchyard 混合，固定</translation>
        </message>
        <message>
            <source>Switchyard mixed, predicted</source>
            <translation>Switchyard 混合，带预测</translation>
        </message>
        <message>
            <source>Switchyard, misses on the CPU</source>
            <translation>Switchyard，缺失部分用 CPU</translation>
        </message>
        <message>
            <source>CPU only</source>
            <translation>仅 CPU</translation>
        </message>
        <message>
            <source>CPU experts</source>
            <translation>专家在 CPU 上</translation>
        </message>
        <message>
            <source>on-demand</source>
            <translation>按需</translation>
        </message>
        <message>
            <source>whole-layer prefetch</source>
            <translation>整层预取</translation>
        </message>
        <message>
            <source>the other weights and the KV cache</source>
            <translation>其他权重和 KV 缓存</translation>
        </message>
        <message>
            <source>the weights and the KV cache</source>
            <translation>权重和 KV 缓存</translation>
        </message>
        <message>
            <source>From now on: {0}, {1} tokens/s.</source>
            <translation>今后：{0}，{1} token/秒。</translation>
        </message>
        <message>
            <source>Before: {0} tokens/s, so {1} times.</source>
            <translation>之前：{0} token/秒，即 {1} 倍速度。</translation>
        </message>
        <message>
            <source>Before, it could not run.</source>
            <translation>之前无法运行。</translation>
        </message>
        <message>
            <source>The settings stay the same: {0} tokens/s, and nothing else is better.</source>
            <translation>设置保持不变：{0} token/秒，没有更好的选择。</translation>
        </message>
        <message>
            <source>{0} did not answer within {1} seconds.</source>
            <translation>{0} 未在 {1} 秒内应答。</translation>
        </message>
        <message>
            <source>{0} did not speak MCP within {1} seconds of its start: check its command or address.</source>
            <translation>{0} 启动后 {1} 秒内未以 MCP 应答：请检查其命令或地址。</translation>
        </message>
        <message>
            <source>{0} ended in the middle of it.</source>
            <translation>{0} 中途结束了。</translation>
        </message>
        <message>
            <source>{0} sent more than {1} MB at once, and was stopped.</source>
            <translation>{0} 一次发送超过 {1} MB，已停止。</translation>
        </message>
        <message>
            <source>{0} could not be started ({1}): check its command.</source>
            <translation>无法启动 {0}（{1}）：请检查其命令。</translation>
        </message>
        <message>
            <source>{0} ended, or does not speak MCP.</source>
            <translation>{0} 已结束，或不支持 MCP。</translation>
        </message>
        <message>
            <source>{0} ended, or does not speak MCP. It wrote: {1}</source>
            <translation>{0} 已结束，或不支持 MCP。其输出：{1}</translation>
        </message>
        <message>
            <source>Give the server a name.</source>
            <translation>请给服务器命名。</translation>
        </message>
        <message>
            <source>{0} needs either a command or an address: enter one of them.</source>
            <translation>{0} 需要命令或地址之一：请输入其中一个。</translation>
        </message>
        <message>
            <source>This is not JSON ({0}): paste the whole block.</source>
            <translation>这不是 JSON（{0}）：请粘贴整个代码块。</translation>
        </message>
        <message>
            <source>The user did not allow this call.</source>
            <translation>此调用未获允许。</translation>
        </message>
        <message>
            <source>There is no tool of this name.</source>
            <translation>没有此名称的工具。</translation>
        </message>
        <message>
            <source>The expression divides by zero.</source>
            <translation>表达式除以零。</translation>
        </message>
        <message>
            <source>No folder is attached to this chat: attach one first.</source>
            <translation>此对话未附文件夹：请先附上一个。</translation>
        </message>
        <message>
            <source>{0} was removed or is off.</source>
            <translation>{0} 已被移除或已关闭。</translation>
        </message>
        <message>
            <source>The process with the tools ended.</source>
            <translation>工具进程已结束。</translation>
        </message>
        <message>
            <source>The process with the tools could not be started.</source>
            <translation>无法启动工具进程。</translation>
        </message>
        <message>
            <source>The tools did not respond, and were stopped.</source>
            <translation>工具没有响应，已停止。</translation>
        </message>
        <message>
            <source>The call was stopped.</source>
            <translation>调用已停止。</translation>
        </message>
        <message>
            <source>The arguments are no JSON object.</source>
            <translation>参数不是 JSON 对象。</translation>
        </message>
        <message>
            <source>{0} was called with the same arguments {1} times: no more calls, answer now.</source>
            <translation>{0} 已以相同参数调用 {1} 次：不再调用，请直接回答。</translation>
        </message>
        <message>
            <source>Tools were called {0} times in a row: no more calls, answer now.</source>
            <translation>工具已连续调用 {0} 次：不再调用，请直接回答。</translation>
        </message>
        <message>
            <source>More than {0} tools were called at once: no more calls, answer now.</source>
            <translation>一次调用了超过 {0} 个工具：不再调用，请直接回答。</translation>
        </message>
        <message>
            <source>{0} has no command and no address: enter one of them.</source>
            <translation>{0} 既没有命令也没有地址：请输入其中一个。</translation>
        </message>
        <message>
            <source>The address of {0} does not begin with http:// or https://: correct it.</source>
            <translation>{0} 的地址不以 http:// 或 https:// 开头：请更正。</translation>
        </message>
        <message>
            <source>The arguments of {0} are not a list of texts: correct them.</source>
            <translation>{0} 的参数不是文本列表：请更正。</translation>
        </message>
        <message>
            <source>The command of {0} has a character that no command can have: correct it.</source>
            <translation>{0} 的命令含有命令不能使用的字符：请更正。</translation>
        </message>
        <message>
            <source>The variables or headers of {0} are not names with texts: correct them.</source>
            <translation>{0} 的变量或请求头不是名称加文本：请更正。</translation>
        </message>
        <message>
            <source>No servers are in it: it needs "mcpServers" with a name for each.</source>
            <translation>其中没有服务器：需要 "mcpServers"，每个服务器带有名称。</translation>
        </message>
        <message>
            <source>{0} servers are too many: up to {1} can be added.</source>
            <translation>{0} 个服务器太多：最多可添加 {1} 个。</translation>
        </message>
        <message>
            <source>{0} needs its {1} again, which was kept for one run only: edit the server.</source>
            <translation>{0} 再次需要 {1}，它只为一次运行保存过：请编辑该服务器。</translation>
        </message>
        <message>
            <source>{0} needs {1} in the environment, where it is not set: set it.</source>
            <translation>{0} 需要环境变量 {1}，但它没有设置：请设置。</translation>
        </message>
        <message>
            <source>No documents are attached to this chat.</source>
            <translation>此对话没有附上文档。</translation>
        </message>
        <message>
            <source>There is no tool named {0}.</source>
            <translation>没有名为 {0} 的工具。</translation>
        </message>
        <message>
            <source>A batch has a prompt and 1 to {0} rows.</source>
            <translation>批处理需要一个提示词和 1 到 {0} 行。</translation>
        </message>
        <message>
            <source>The rows cannot be written to {0} ({1}).</source>
            <translation>无法将行写入 {0}（{1}）。</translation>
        </message>
        <message>
            <source>The file {0} cannot be read ({1}).</source>
            <translation>无法读取文件 {0}（{1}）。</translation>
        </message>
        <message>
            <source>The file {0} is no text.</source>
            <translation>文件 {0} 不是文本。</translation>
        </message>
        <message>
            <source>No attached folder has a file {0}.</source>
            <translation>所附文件夹中没有文件 {0}。</translation>
        </message>
        <message>
            <source>The result has too many digits.</source>
            <translation>结果位数太多。</translation>
        </message>
        <message>
            <source>The result is no real number.</source>
            <translation>结果不是实数。</translation>
        </message>
        <message>
            <source>A factorial is of a whole number from 0 to 1000.</source>
            <translation>阶乘仅适用于 0 到 1000 的整数。</translation>
        </message>
        <message>
            <source>An expression has 1 to {0} characters.</source>
            <translation>表达式应为 1 到 {0} 个字符。</translation>
        </message>
        <message>
            <source>The expression cannot be read ({0}).</source>
            <translation>无法读取表达式（{0}）。</translation>
        </message>
        <message>
            <source>The expression cannot be computed ({0}).</source>
            <translation>无法计算表达式（{0}）。</translation>
        </message>
        <message>
            <source>Only numbers, + - * / // % **, and functions such as sqrt, log, sin and round are computed.</source>
            <translation>只能计算数字、+ - * / // % ** 以及 sqrt、log、sin、round 等函数。</translation>
        </message>
        <message>
            <source>The starter model is not on this machine yet.</source>
            <translation>这台机器上还没有入门模型。</translation>
        </message>
        <message>
            <source>There is no file {0}: check the path.</source>
            <translation>没有文件 {0}：请检查路径。</translation>
        </message>
        <message>
            <source>There is no folder {0}: check the path.</source>
            <translation>没有文件夹 {0}：请检查路径。</translation>
        </message>
        <message>
            <source>There is no model at {0}: check the path.</source>
            <translation>{0} 处没有模型：请检查路径。</translation>
        </message>
        <message>
            <source>{0} is not a folder: check the path.</source>
            <translation>{0} 不是文件夹：请检查路径。</translation>
        </message>
        <message>
            <source>{0} cannot be read ({1}): check the path.</source>
            <translation>无法读取 {0}（{1}）：请检查路径。</translation>
        </message>
        <message>
            <source>{0} cannot be read ({1}): download or copy the model again.</source>
            <translation>无法读取 {0}（{1}）：请重新下载或复制模型。</translation>
        </message>
        <message>
            <source>{0} has no {1}, so it is not a complete model: download or copy it again.</source>
            <translation>{0} 缺少 {1}，不是完整的模型：请重新下载或复制。</translation>
        </message>
        <message>
            <source>{0} is a pickle file, which can run code when opened, so Switchyard never loads one: use the model's safetensors version.</source>
            <translation>{0} 是打开时可能运行代码的 pickle 文件，Switchyard 从不加载此类文件：请使用模型的 safetensors 版本。</translation>
        </message>
        <message>
            <source>{0} is in use: unload it in Switchyard's window, end other programs with it, and try again.</source>
            <translation>{0} 正在使用：请在 Switchyard 窗口中卸载，结束使用它的其他程序，然后重试。</translation>
        </message>
        <message>
            <source>{0} is being moved or removed: wait until that is done.</source>
            <translation>正在移动或移除 {0}：请等待完成。</translation>
        </message>
        <message>
            <source>{0} exists already: choose another name.</source>
            <translation>{0} 已存在：请选择其他名称。</translation>
        </message>
        <message>
            <source>{0} is already in the library.</source>
            <translation>{0} 已在模型库中。</translation>
        </message>
        <message>
            <source>The model folder {0} is not there: connect its disk, or take the folder off the list.</source>
            <translation>找不到模型文件夹 {0}：请连接其磁盘，或将该文件夹从列表中移除。</translation>
        </message>
        <message>
            <source>The disk of {0} is full: make room and try again.</source>
            <translation>{0} 所在磁盘已满：请腾出空间后重试。</translation>
        </message>
        <message>
            <source>The disk of {0} is full: make room and let the download go on; nothing is lost.</source>
            <translation>{0} 所在磁盘已满：请腾出空间并继续下载；没有丢失任何内容。</translation>
        </message>
        <message>
            <source>The disk of {0} is full: free some space, and the job continues.</source>
            <translation>{0} 所在磁盘已满：腾出空间后任务会继续。</translation>
        </message>
        <message>
            <source>Cannot read or write {0} ({1}): check its permissions and the disk.</source>
            <translation>无法读取或写入 {0}（{1}）：请检查权限和磁盘。</translation>
        </message>
        <message>
            <source>{0} needs {1} of RAM{2}, but only {3} are free: close other programs or choose a smaller model.</source>
            <translation>{0} 需要 {1} 内存{2}，但只有 {3} 空闲：请关闭其他程序或选择更小的模型。</translation>
        </message>
        <message>
            <source>{0} needs {1} of RAM{2}, more than the {3} that the RAM budget allows: raise the budget or choose a smaller model.</source>
            <translation>{0} 需要 {1} 内存{2}，超过内存上限 {3}：请提高上限或选择更小的模型。</translation>
        </message>
        <message>
            <source>{0} ran out of memory: close other programs, or allow the model less memory or a shorter context.</source>
            <translation>{0} 内存不足：请关闭其他程序，或减少模型的内存或上下文。</translation>
        </message>
        <message>
            <source>{0} has no graphics card: choose one first.</source>
            <translation>{0} 没有显卡：请先选择一块。</translation>
        </message>
        <message>
            <source>The graphics card stopped responding, so the model runs on the CPU now.</source>
            <translation>显卡停止响应，模型现在在 CPU 上运行。</translation>
        </message>
        <message>
            <source>The NVIDIA driver does not respond: restart the computer, or update the driver.</source>
            <translation>NVIDIA 驱动没有响应：请重启电脑，或更新驱动。</translation>
        </message>
        <message>
            <source>No NVIDIA driver was found.</source>
            <translation>未找到 NVIDIA 驱动。</translation>
        </message>
        <message>
            <source>The {0} was {1} and is now {2}.</source>
            <translation>变化：{0}，原为 {1}，现为 {2}。</translation>
        </message>
        <message>
            <source>The prompt is {0} tokens long, but this model holds {1} together with the answer: shorten it by {2} tokens, or start a new chat.</source>
            <translation>提示词有 {0} 个 token，而此模型连同回答可容纳 {1} 个：请缩短 {2} 个 token，或开始新对话。</translation>
        </message>
        <message>
            <source>No model is loaded: choose one first.</source>
            <translation>未加载模型：请先选择一个。</translation>
        </message>
        <message>
            <source>There was not enough memory to choose this answer's next token: close other programs and ask again.</source>
            <translation>内存不足，无法选择此回答的下一个 token：请关闭其他程序后再次提问。</translation>
        </message>
        <message>
            <source>Could not read {0} from {1} ({2}): check the network; models on this PC still work.</source>
            <translation>无法从 {1} 读取 {0}（{2}）：请检查网络；这台电脑上的模型仍可使用。</translation>
        </message>
        <message>
            <source>{0} cannot be reached: waiting for the network.</source>
            <translation>无法连接 {0}：正在等待网络。</translation>
        </message>
        <message>
            <source>The connection to {0} broke: trying again.</source>
            <translation>与 {0} 的连接中断：正在重试。</translation>
        </message>
        <message>
            <source>{0} sends nothing: waiting.</source>
            <translation>{0} 没有发送数据：正在等待。</translation>
        </message>
        <message>
            <source>{0} gives {1} only to those it knows: enter an access token of an account that may read it.</source>
            <translation>{0} 仅向获准的用户提供 {1}：请输入有读取权限的账户的访问令牌。</translation>
        </message>
        <message>
            <source>{0} got too many requests from here: try again {1}.</source>
            <translation>从这里发往 {0} 的请求过多：请稍后重试（{1}）。</translation>
        </message>
        <message>
            <source>{0} gave no answer ({1}): check that the server runs, and the network.</source>
            <translation>{0} 没有回应（{1}）：请检查服务器是否在运行以及网络。</translation>
        </message>
        <message>
            <source>There is no server with OpenAI's interface at {0} ({1}): check the address.</source>
            <translation>{0} 处没有使用 OpenAI 接口的服务器（{1}）：请检查地址。</translation>
        </message>
        <message>
            <source>{0} is not an address of a server: it must begin with http:// or https://.</source>
            <translation>{0} 不是服务器地址：必须以 http:// 或 https:// 开头。</translation>
        </message>
        <message>
            <source>{0} is not an address: enter one such as http://10.0.0.5:8000/v1.</source>
            <translation>{0} 不是地址：请输入类似 http://10.0.0.5:8000/v1 的地址。</translation>
        </message>
        <message>
            <source>There is an endpoint called {0} already, or nearly so: choose another name.</source>
            <translation>已有名为 {0}（或非常相近）的服务器：请选择其他名称。</translation>
        </message>
        <message>
            <source>This is not a key: copy it again, in one piece and without spaces.</source>
            <translation>这不是密钥：请重新完整复制，不含空格。</translation>
        </message>
        <message>
            <source>This is not a token: copy it again from the hub's settings page, in one piece.</source>
            <translation>这不是令牌：请从 Hub 的设置页面重新完整复制。</translation>
        </message>
        <message>
            <source>This file holds no certificate in PEM.</source>
            <translation>此文件不含 PEM 证书。</translation>
        </message>
        <message>
            <source>{0} has no rows: there is nothing to answer.</source>
            <translation>{0} 没有行：没有可回答的内容。</translation>
        </message>
        <message>
            <source>{0} cannot be written ({1}): choose another output.</source>
            <translation>无法写入 {0}（{1}）：请选择其他输出。</translation>
        </message>
        <message>
            <source>{0} is within the input: choose another output.</source>
            <translation>{0} 位于输入之内：请选择其他输出。</translation>
        </message>
        <message>
            <source>{0} is protected by a password or is an old .xls: save it as .xlsx without a password.</source>
            <translation>{0} 受密码保护或是旧的 .xls：请另存为不带密码的 .xlsx。</translation>
        </message>
        <message>
            <source>Another run is working on the job of {0}: wait for it or stop it first.</source>
            <translation>另一个进程正在处理 {0} 的任务：请等待，或先将其停止。</translation>
        </message>
        <message>
            <source>{0} was stopped.</source>
            <translation>{0} 已停止。</translation>
        </message>
        <message>
            <source>{0} failed: {1}.</source>
            <translation>{0} 失败：{1}。</translation>
        </message>
    </context>
    <context>
        <name>EngineCard</name>
        <message>
            <source>First, the engine</source>
            <translation>首先是引擎</translation>
        </message>
        <message>
            <source>Progress of the engine</source>
            <translation>引擎进度</translation>
        </message>
        <message>
            <source>Get the engine and the starter</source>
            <translation>获取引擎和入门模型</translation>
        </message>
        <message>
            <source>Engine only</source>
            <translation>仅引擎</translation>
        </message>
        <message>
            <source>Resume</source>
            <translation>继续</translation>
        </message>
        <message>
            <source>Try again</source>
            <translation>重试</translation>
        </message>
        <message>
            <source>Pause</source>
            <translation>暂停</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>取消</translation>
        </message>
        <message>
            <source>Use a file…</source>
            <translation>使用文件…</translation>
        </message>
        <message>
            <source>For a computer without a network: files that another computer has fetched</source>
            <translation>适用于没有网络的电脑：由另一台电脑下载的文件</translation>
        </message>
        <message>
            <source>Mirror and proxy…</source>
            <translation>镜像与代理…</translation>
        </message>
        <message>
            <source>The engine's files (*.zip *.whl)</source>
            <translation>引擎的文件 (*.zip *.whl)</translation>
        </message>
        <message>
            <source>The engine's files</source>
            <translation>引擎的文件</translation>
        </message>
    </context>
    <context>
        <name>EngineClient</name>
        <message>
            <source>The engine was restarted before this request was done.</source>
            <translation>此请求完成之前引擎已重启。</translation>
        </message>
        <message>
            <source>The engine is not running; start it first.</source>
            <translation>引擎未运行；请先启动。</translation>
        </message>
        <message>
            <source>The engine uses protocol version {0} and this window version {1}: two installations are mixed, so reinstall Switchyard.</source>
            <translation>引擎使用协议版本 {0}，此窗口使用版本 {1}：混用了两个安装，请重新安装 Switchyard。</translation>
        </message>
        <message>
            <source>The engine was stopped before this request was done.</source>
            <translation>此请求完成之前引擎已停止。</translation>
        </message>
        <message>
            <source>The engine has not responded for {0} seconds: wait, or restart it.</source>
            <translation>引擎已有 {0} 秒没有响应：请等待，或重启引擎。</translation>
        </message>
        <message>
            <source>A file of {0} became shorter, or its disk failed, while it was in use. Put the whole file back, then restart the engine.</source>
            <translation>{0} 的文件在使用中变短，或其磁盘出现故障。请放回完整的文件，然后重启引擎。</translation>
        </message>
        <message>
            <source>The engine exited unexpectedly (code {0}); see its log for details.</source>
            <translation>引擎意外退出（代码 {0}）；详情见其日志。</translation>
        </message>
        <message>
            <source>The engine crashed (status {0}).</source>
            <translation>引擎崩溃（状态 {0}）。</translation>
        </message>
        <message>
            <source>The engine was killed (signal 9), perhaps for lack of memory.</source>
            <translation>引擎被系统终止（信号 9），可能是内存不足。</translation>
        </message>
        <message>
            <source>The engine crashed (signal 4): this processor lacks an instruction that it used.</source>
            <translation>引擎崩溃（信号 4）：处理器缺少所用的指令。</translation>
        </message>
        <message>
            <source>The engine crashed (signal {0}: {1}).</source>
            <translation>引擎崩溃（信号 {0}：{1}）。</translation>
        </message>
    </context>
    <context>
        <name>EnginePart</name>
        <message>
            <source>The installation was stopped. Nothing is lost: try again.</source>
            <translation>安装已中断。没有丢失任何内容：请重试。</translation>
        </message>
    </context>
    <context>
        <name>ExpertCard</name>
        <message>
            <source>Expert map</source>
            <translation>专家图</translation>
        </message>
        <message>
            <source>A model like this has many small parts in each layer, called experts, and every token uses only a few of them. Each square is one expert: the stronger its colour, the more it is used; its pattern shows where it is stored.</source>
            <translation>这类模型的每一层都有许多称为“专家”的小部分，每个 token 只用其中几个。每个方块代表一个专家：颜色越深，使用越多；花纹表示其存放位置。</translation>
        </message>
        <message>
            <source>By use</source>
            <translation>按使用量</translation>
        </message>
        <message>
            <source>Sort each layer's experts by use instead of by number</source>
            <translation>每层专家按使用量而非编号排序</translation>
        </message>
        <message>
            <source>Table</source>
            <translation>表格</translation>
        </message>
        <message>
            <source>The same experts as numbers, sorted by any column</source>
            <translation>以数字显示同样的专家，可按任一列排序</translation>
        </message>
        <message>
            <source>Show the experts as a table</source>
            <translation>以表格显示专家</translation>
        </message>
        <message>
            <source>Time in the recorded session</source>
            <translation>所录会话中的时间</translation>
        </message>
        <message>
            <source>Scrubs through the session's maps</source>
            <translation>浏览会话中的各张图</translation>
        </message>
        <message>
            <source>Load a model with experts and ask something: each square is an expert.</source>
            <translation>加载带专家的模型并提问：每个方块代表一个专家。</translation>
        </message>
        <message>
            <source>{0} × {1}</source>
            <translation>{0} × {1}</translation>
        </message>
        <message>
            <source>{0} layers with {1} experts each</source>
            <translation>{0} 层，每层 {1} 个专家</translation>
        </message>
        <message>
            <source>Experts as a table</source>
            <translation>专家表格</translation>
        </message>
    </context>
    <context>
        <name>ExpertMap</name>
        <message>
            <source>in VRAM</source>
            <translation>在显存中</translation>
        </message>
        <message>
            <source>fetching</source>
            <translation>取入中</translation>
        </message>
        <message>
            <source>in RAM</source>
            <translation>在内存中</translation>
        </message>
        <message>
            <source>on disk</source>
            <translation>在磁盘上</translation>
        </message>
    </context>
    <context>
        <name>ExpertMapView</name>
        <message>
            <source>Expert map</source>
            <translation>专家图</translation>
        </message>
        <message>
            <source>Layers by experts. Arrow keys move from expert to expert.</source>
            <translation>层 × 专家。用方向键在专家之间移动。</translation>
        </message>
        <message>
            <source>Layer {0}, expert {1}</source>
            <translation>第 {0} 层，专家 {1}</translation>
        </message>
        <message>
            <source>used {0} times</source>
            <translation>使用 {0} 次</translation>
        </message>
        <message>
            <source>hit {0}%</source>
            <translation>命中 {0}%</translation>
        </message>
        <message>
            <source>never used</source>
            <translation>从未使用</translation>
        </message>
        <message>
            <source>last {0} steps ago</source>
            <translation>上次在 {0} 步前</translation>
        </message>
    </context>
    <context>
        <name>ExpertTable</name>
        <message>
            <source>Layer</source>
            <translation>层</translation>
        </message>
        <message>
            <source>Expert</source>
            <translation>专家</translation>
        </message>
        <message>
            <source>Uses</source>
            <translation>使用次数</translation>
        </message>
        <message>
            <source>Hits</source>
            <translation>命中</translation>
        </message>
        <message>
            <source>Steps ago</source>
            <translation>几步前</translation>
        </message>
        <message>
            <source>Size</source>
            <translation>大小</translation>
        </message>
        <message>
            <source>Where</source>
            <translation>位置</translation>
        </message>
    </context>
    <context>
        <name>ExportButton</name>
        <message>
            <source>Export</source>
            <translation>导出</translation>
        </message>
        <message>
            <source>Contains no text of prompts or answers</source>
            <translation>不包含提示词或回答的文本</translation>
        </message>
        <message>
            <source>Trace for Perfetto and Chrome (JSON)…</source>
            <translation>Perfetto 和 Chrome 的跟踪记录 (JSON)…</translation>
        </message>
        <message>
            <source>Tables of spans and steps (CSV)…</source>
            <translation>区段和步骤表格 (CSV)…</translation>
        </message>
        <message>
            <source>Picture (PNG)…</source>
            <translation>图片 (PNG)…</translation>
        </message>
        <message>
            <source>Drawing (SVG)…</source>
            <translation>矢量图 (SVG)…</translation>
        </message>
        <message>
            <source>Nothing to export yet: ask something in Chat first.</source>
            <translation>还没有可导出的内容：请先在“对话”中提问。</translation>
        </message>
        <message>
            <source>{0} spans written to {1}</source>
            <translation>已将 {0} 个区段写入 {1}</translation>
        </message>
        <message>
            <source>Written to {0}</source>
            <translation>已保存到 {0}</translation>
        </message>
        <message>
            <source>{0} could not be written; choose another folder.</source>
            <translation>无法写入 {0}；请选择其他文件夹。</translation>
        </message>
        <message>
            <source>{0} could not be written ({1}); choose another folder.</source>
            <translation>无法写入 {0}（{1}）；请选择其他文件夹。</translation>
        </message>
    </context>
    <context>
        <name>FindBar</name>
        <message>
            <source>Find in this chat</source>
            <translation>在此对话中查找</translation>
        </message>
        <message>
            <source>Previous match  Shift+F3</source>
            <translation>上一处匹配  Shift+F3</translation>
        </message>
        <message>
            <source>Next match  F3</source>
            <translation>下一处匹配  F3</translation>
        </message>
        <message>
            <source>Close  Esc</source>
            <translation>关闭  Esc</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} / {1}</translation>
        </message>
        <message>
            <source>looking…</source>
            <translation>正在查找…</translation>
        </message>
        <message>
            <source>not in this chat</source>
            <translation>此对话中没有</translation>
        </message>
    </context>
    <context>
        <name>FirstRun</name>
        <message>
            <source>{0} with {1}</source>
            <translation>{0}，{1}</translation>
        </message>
        <message>
            <source>1 core</source>
            <translation>1 核</translation>
        </message>
        <message numerus="yes">
            <source>{0} cores</source>
            <translation>
                <numerusform>{0} 核</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} of RAM, {1}</source>
            <translation>内存 {0}，{1}</translation>
        </message>
        <message>
            <source>{0} free on the disk for models</source>
            <translation>磁盘有 {0} 可用于模型</translation>
        </message>
        <message>
            <source>Models of up to about {0} run from memory; parts of larger ones are read from the disk as they answer, which takes longer.</source>
            <translation>约 {0} 以内的模型可在内存中运行；更大的模型在回答时会从磁盘读取部分内容，耗时更长。</translation>
        </message>
        <message>
            <source>This processor has no AVX2: everything works, but takes several times as long.</source>
            <translation>此处理器没有 AVX2：一切都能运行，但需要数倍的时间。</translation>
        </message>
        <message>
            <source>Graphics card and processor share the work.</source>
            <translation>显卡和处理器分担工作。</translation>
        </message>
        <message>
            <source>The graphics card cannot be used here: the processor does the work.</source>
            <translation>这里无法使用显卡：由处理器完成工作。</translation>
        </message>
        <message>
            <source>There is no graphics card for models: the processor does the work.</source>
            <translation>没有可用于模型的显卡：由处理器完成工作。</translation>
        </message>
        <message>
            <source>Looking at this PC…</source>
            <translation>正在检查这台电脑…</translation>
        </message>
        <message>
            <source>no graphics card that PyTorch can use</source>
            <translation>没有 PyTorch 可用的显卡</translation>
        </message>
        <message>
            <source>Found: {0}. Everything is here already, and is prepared for this version.</source>
            <translation>检测到：{0}。所需内容都已在本机，正为此版本做准备。</translation>
        </message>
        <message>
            <source>It is fetched once: {0}, about {1} on the disk when it is unpacked.</source>
            <translation>只需下载一次：{0}，解压后约占磁盘 {1}。</translation>
        </message>
        <message>
            <source>The engine with PyTorch for {0} suits this PC.</source>
            <translation>适用于 {0} 的 PyTorch 引擎适合这台电脑。</translation>
        </message>
        <message>
            <source>Found: {0}. The engine comes with PyTorch for {1}.</source>
            <translation>检测到：{0}。引擎附带适用于 {1} 的 PyTorch。</translation>
        </message>
        <message>
            <source>Checking what was fetched…</source>
            <translation>正在检查下载的内容…</translation>
        </message>
        <message>
            <source>Unpacking…</source>
            <translation>正在解压…</translation>
        </message>
        <message>
            <source>Testing it on this PC…</source>
            <translation>正在这台电脑上测试…</translation>
        </message>
        <message>
            <source>Finishing…</source>
            <translation>正在收尾…</translation>
        </message>
        <message>
            <source>Installing…</source>
            <translation>正在安装…</translation>
        </message>
    </context>
    <context>
        <name>FirstRunPage</name>
        <message>
            <source>This PC</source>
            <translation>这台电脑</translation>
        </message>
        <message>
            <source>Recommended for this PC</source>
            <translation>推荐用于这台电脑</translation>
        </message>
        <message>
            <source>Just try the starter</source>
            <translation>先试试入门模型</translation>
        </message>
        <message>
            <source>A small Mixture of Experts that runs on any machine, converted here from a PyPI package, for a first look. It gets facts wrong and may repeat itself.</source>
            <translation>一个可在任何机器上运行的小型混合专家模型，由 PyPI 软件包在本机转换而来，供初次体验。可能弄错事实，也可能重复。</translation>
        </message>
        <message>
            <source>Looking at this PC…</source>
            <translation>正在检查这台电脑…</translation>
        </message>
        <message>
            <source>Choose a first model</source>
            <translation>选择第一个模型</translation>
        </message>
        <message>
            <source>Welcome to Switchyard</source>
            <translation>欢迎使用 Switchyard</translation>
        </message>
        <message>
            <source>Open a model file…</source>
            <translation>打开模型文件…</translation>
        </message>
        <message>
            <source>Search for others…</source>
            <translation>搜索其他模型…</translation>
        </message>
        <message>
            <source>Use a remote server…</source>
            <translation>使用远程服务器…</translation>
        </message>
        <message>
            <source>Go to the chats</source>
            <translation>前往对话</translation>
        </message>
        <message>
            <source>First the engine, then a model. Nothing is downloaded before you click.</source>
            <translation>先获取引擎，再获取模型。您点击之前不会下载任何内容。</translation>
        </message>
        <message>
            <source>Choose a first model. Nothing is downloaded before you click.</source>
            <translation>请选择第一个模型。您点击之前不会下载任何内容。</translation>
        </message>
        <message>
            <source>No model of the catalogue suits this PC: the starter runs everywhere.</source>
            <translation>目录中没有适合这台电脑的模型：入门模型在任何电脑上都能运行。</translation>
        </message>
    </context>
    <context>
        <name>Fit</name>
        <message>
            <source>{0}%</source>
            <translation>{0}%</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>显存</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>内存</translation>
        </message>
        <message>
            <source>{0} MB</source>
            <translation>{0} MB</translation>
        </message>
        <message>
            <source>Fast</source>
            <translation>快速</translation>
        </message>
        <message>
            <source>Works</source>
            <translation>可用</translation>
        </message>
        <message>
            <source>Batch only</source>
            <translation>仅批处理</translation>
        </message>
        <message>
            <source>Too large</source>
            <translation>过大</translation>
        </message>
        <message>
            <source>original</source>
            <translation>原始</translation>
        </message>
        <message>
            <source>near-original</source>
            <translation>接近原始</translation>
        </message>
        <message>
            <source>good quality</source>
            <translation>质量良好</translation>
        </message>
        <message>
            <source>fair quality</source>
            <translation>质量一般</translation>
        </message>
        <message>
            <source>poor quality</source>
            <translation>质量较差</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} token/秒</translation>
        </message>
        <message>
            <source>about {0} tokens/s</source>
            <translation>约 {0} token/秒</translation>
        </message>
        <message>
            <source>measured here</source>
            <translation>本机实测</translation>
        </message>
        <message>
            <source>estimated, {0} to {1}</source>
            <translation>估计，{0} 至 {1}</translation>
        </message>
        <message>
            <source>first token after {0} s</source>
            <translation>首个 token {0} 秒</translation>
        </message>
        <message>
            <source>first token after about {0} s</source>
            <translation>首个 token 约 {0} 秒</translation>
        </message>
        <message>
            <source>pictures: about {0} s each on the graphics card, {1}</source>
            <translation>图片：在显卡上每张约 {0} 秒，{1}</translation>
        </message>
        <message>
            <source>pictures: about {0} s each on the CPU, {1}</source>
            <translation>图片：在 CPU 上每张约 {0} 秒，{1}</translation>
        </message>
        <message>
            <source>download</source>
            <translation>下载</translation>
        </message>
        <message>
            <source>converted weights</source>
            <translation>已转换的权重</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>磁盘</translation>
        </message>
        <message>
            <source>Library</source>
            <translation>模型库</translation>
        </message>
        <message>
            <source>recommended</source>
            <translation>推荐</translation>
        </message>
        <message numerus="yes">
            <source>{0} and {1} more</source>
            <translation>
                <numerusform>{0} 等另外 {1} 个</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} GB</source>
            <translation>{0} GB</translation>
        </message>
        <message>
            <source>{0} GB/s</source>
            <translation>{0} GB/s</translation>
        </message>
        <message>
            <source>{0} s</source>
            <translation>{0} 秒</translation>
        </message>
        <message>
            <source>{0} min</source>
            <translation>{0} 分钟</translation>
        </message>
        <message>
            <source>{0} h {1} min</source>
            <translation>{0} 小时 {1} 分钟</translation>
        </message>
        <message>
            <source>{0} h</source>
            <translation>{0} 小时</translation>
        </message>
        <message numerus="yes">
            <source>{0} days</source>
            <translation>
                <numerusform>{0} 天</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} MB/s</source>
            <translation>{0} MB/s</translation>
        </message>
    </context>
    <context>
        <name>FitCardView</name>
        <message>
            <source>Context in tokens</source>
            <translation>上下文（token）</translation>
        </message>
        <message>
            <source>Memory for the expert cache</source>
            <translation>专家缓存的内存</translation>
        </message>
        <message>
            <source>VRAM to use</source>
            <translation>可用显存</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>下载</translation>
        </message>
        <message>
            <source>Load anyway…</source>
            <translation>仍然加载…</translation>
        </message>
        <message>
            <source>RAM to use</source>
            <translation>可用内存</translation>
        </message>
        <message>
            <source>Reading what the repository holds…</source>
            <translation>正在读取存储库内容…</translation>
        </message>
        <message>
            <source>Reading headers: {0} of {1} files…</source>
            <translation>正在读取文件头：{0} / {1} 个文件…</translation>
        </message>
        <message>
            <source>{0} tokens</source>
            <translation>{0} 个 token</translation>
        </message>
        <message>
            <source>all that is free</source>
            <translation>全部空闲空间</translation>
        </message>
        <message>
            <source>at most {0}</source>
            <translation>最多 {0}</translation>
        </message>
        <message>
            <source>runs in {0}</source>
            <translation>以 {0} 运行</translation>
        </message>
        <message>
            <source>keys and values of that context: {0}</source>
            <translation>该上下文的键值：{0}</translation>
        </message>
        <message>
            <source>Download {0}</source>
            <translation>下载 {0}</translation>
        </message>
        <message>
            <source>Downloading {0}</source>
            <translation>正在下载 {0}</translation>
        </message>
        <message>
            <source>Load {0}</source>
            <translation>加载 {0}</translation>
        </message>
        <message>
            <source>Load {0} anyway</source>
            <translation>仍然加载 {0}</translation>
        </message>
        <message>
            <source>There is no {0} here. {1} would be downloaded: choose another row to take that one.</source>
            <translation>这里没有 {0}。将下载 {1}：要改用该文件，请选择另一行。</translation>
        </message>
        <message>
            <source>No file was named. {0} would be downloaded: choose another row to take that one.</source>
            <translation>没有指定文件。将下载 {0}：要改用该文件，请选择另一行。</translation>
        </message>
        <message>
            <source>Context</source>
            <translation>上下文</translation>
        </message>
    </context>
    <context>
        <name>FitDelegate</name>
        <message>
            <source>recommended</source>
            <translation>推荐</translation>
        </message>
    </context>
    <context>
        <name>FitTable</name>
        <message>
            <source>File</source>
            <translation>文件</translation>
        </message>
        <message>
            <source>Memory</source>
            <translation>内存</translation>
        </message>
        <message>
            <source>Speed</source>
            <translation>速度</translation>
        </message>
        <message>
            <source>On this PC</source>
            <translation>在这台电脑上</translation>
        </message>
        <message>
            <source>Files, and how they would run here</source>
            <translation>文件及其在本机的运行情况</translation>
        </message>
    </context>
    <context>
        <name>FoldCard</name>
        <message>
            <source>Edit the summary</source>
            <translation>编辑总结</translation>
        </message>
        <message>
            <source>Summarise again</source>
            <translation>重新总结</translation>
        </message>
        <message>
            <source>Send the turns again</source>
            <translation>重新发送消息</translation>
        </message>
        <message>
            <source>The model reads the turns themselves again, as far as they fit.</source>
            <translation>在放得下的范围内，模型会重新读取消息本身。</translation>
        </message>
        <message>
            <source>Hide the turns</source>
            <translation>隐藏消息</translation>
        </message>
        <message>
            <source>Show the turns</source>
            <translation>显示消息</translation>
        </message>
        <message>
            <source>Write a summary</source>
            <translation>写总结</translation>
        </message>
        <message>
            <source>Summary of the earlier turns</source>
            <translation>较早消息的总结</translation>
        </message>
        <message>
            <source>Summary of one earlier turn</source>
            <translation>1 条较早消息的总结</translation>
        </message>
        <message numerus="yes">
            <source>Summary of {0} earlier turns</source>
            <translation>
                <numerusform>{0} 条较早消息的总结</numerusform>
            </translation>
        </message>
        <message>
            <source>One earlier turn is left out</source>
            <translation>略去了 1 条较早的消息</translation>
        </message>
        <message numerus="yes">
            <source>{0} earlier turns are left out</source>
            <translation>
                <numerusform>略去了 {0} 条较早的消息</numerusform>
            </translation>
        </message>
        <message>
            <source>These turns were changed since the summary was made.</source>
            <translation>总结之后这些消息有改动。</translation>
        </message>
        <message>
            <source>The model reads nothing of them. They are kept, and can be sent again.</source>
            <translation>模型不会读取这些消息。消息会保留，可以重新发送。</translation>
        </message>
        <message>
            <source>you</source>
            <translation>您</translation>
        </message>
        <message>
            <source>The model reads this instead of the turns, which are kept. Written by {0}.</source>
            <translation>模型读取此总结而不是消息；消息会保留。作者：{0}。</translation>
        </message>
    </context>
    <context>
        <name>FolderChoice</name>
        <message>
            <source>Download folder</source>
            <translation>下载所用的文件夹</translation>
        </message>
        <message>
            <source>Download to</source>
            <translation>下载到</translation>
        </message>
        <message>
            <source>Library</source>
            <translation>模型库</translation>
        </message>
        <message>
            <source>not connected</source>
            <translation>未连接</translation>
        </message>
        <message>
            <source>{0} free</source>
            <translation>{0} 空闲</translation>
        </message>
    </context>
    <context>
        <name>FoldersDialog</name>
        <message>
            <source>Model folders</source>
            <translation>模型文件夹</translation>
        </message>
        <message>
            <source>Models in these folders are listed and used where they lie. The Models page asks which of them a download goes into. Those of LM Studio, Ollama, Jan, GPT4All and the hub's own cache are found automatically.</source>
            <translation>这些文件夹中的模型会列出并就地使用。下载时可在“模型”页选择放入哪个文件夹。LM Studio、Ollama、Jan、GPT4All 以及 Hub 自身缓存的文件夹会自动找到。</translation>
        </message>
        <message>
            <source>Add a folder…</source>
            <translation>添加文件夹…</translation>
        </message>
        <message>
            <source>Remove from list</source>
            <translation>从列表中移除</translation>
        </message>
        <message>
            <source>Open</source>
            <translation>打开</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>关闭</translation>
        </message>
        <message>
            <source>Folder with models</source>
            <translation>包含模型的文件夹</translation>
        </message>
    </context>
    <context>
        <name>FormFoot</name>
        <message>
            <source>Cancel</source>
            <translation>取消</translation>
        </message>
        <message>
            <source>Start</source>
            <translation>开始</translation>
        </message>
        <message>
            <source>Checking…</source>
            <translation>正在检查…</translation>
        </message>
    </context>
    <context>
        <name>FoundList</name>
        <message>
            <source>Models to get</source>
            <translation>可获取的模型</translation>
        </message>
    </context>
    <context>
        <name>HelpMark</name>
        <message>
            <source>What is “{0}”?</source>
            <translation>什么是“{0}”？</translation>
        </message>
    </context>
    <context>
        <name>HereCard</name>
        <message>
            <source>Already on this PC</source>
            <translation>已在这台电脑上</translation>
        </message>
        <message>
            <source>One more is on the Models page.</source>
            <translation>“模型”页还有 1 个。</translation>
        </message>
        <message numerus="yes">
            <source>{0} more are on the Models page.</source>
            <translation>
                <numerusform>“模型”页还有 {0} 个。</numerusform>
            </translation>
        </message>
        <message>
            <source>Use</source>
            <translation>使用</translation>
        </message>
        <message>
            <source>Use {0}</source>
            <translation>使用 {0}</translation>
        </message>
    </context>
    <context>
        <name>HubCard</name>
        <message>
            <source>Finding models</source>
            <translation>查找模型</translation>
        </message>
        <message>
            <source>Load from file…</source>
            <translation>从文件加载…</translation>
        </message>
        <message>
            <source>Catalogue of recommendations</source>
            <translation>推荐目录</translation>
        </message>
        <message>
            <source>Asked instead of Hugging Face, also on the command line.</source>
            <translation>代替 Hugging Face 查询，命令行也适用。</translation>
        </message>
        <message>
            <source>HF_ENDPOINT in the environment names {0}, which is used.</source>
            <translation>环境变量 HF_ENDPOINT 指定了 {0}，将使用该地址。</translation>
        </message>
        <message>
            <source>Mirror of the hub</source>
            <translation>Hub 镜像</translation>
        </message>
        <message>
            <source>PyPI and PyTorch</source>
            <translation>PyPI 和 PyTorch</translation>
        </message>
        <message>
            <source>Where the engine of an installed Switchyard is fetched from instead.</source>
            <translation>安装版 Switchyard 的引擎改从这里获取。</translation>
        </message>
        <message>
            <source>Mirror of packages</source>
            <translation>软件包镜像</translation>
        </message>
        <message>
            <source>the system's</source>
            <translation>系统的设置</translation>
        </message>
        <message>
            <source>For everything from the network; where it wants a login, as http://NAME:PASSWORD@HOST:PORT.</source>
            <translation>用于所有网络内容；如需登录，格式为 http://NAME:PASSWORD@HOST:PORT。</translation>
        </message>
        <message>
            <source>Proxy</source>
            <translation>代理</translation>
        </message>
        <message>
            <source>None is kept. One is asked for when a model needs it.</source>
            <translation>没有保存任何令牌。模型需要时会询问。</translation>
        </message>
        <message>
            <source>In the system's keyring, or for this run only where there is none.</source>
            <translation>保存在系统密钥环中；没有密钥环时仅限本次运行。</translation>
        </message>
        <message>
            <source>Access tokens</source>
            <translation>访问令牌</translation>
        </message>
        <message>
            <source>A newer catalogue</source>
            <translation>较新的目录</translation>
        </message>
        <message>
            <source>Catalogues (*.json)</source>
            <translation>目录 (*.json)</translation>
        </message>
        <message>
            <source>{0} models, as of {1}.</source>
            <translation>{0} 个模型，截至 {1}。</translation>
        </message>
        <message>
            <source>The token of another program is still used for {0}: see “hf auth logout”, or HF_TOKEN.</source>
            <translation>{0} 仍在使用另一个程序的令牌：请参阅“hf auth logout”或 HF_TOKEN。</translation>
        </message>
    </context>
    <context>
        <name>InputCard</name>
        <message>
            <source>Another file…</source>
            <translation>其他文件…</translation>
        </message>
        <message>
            <source>First rows of the file</source>
            <translation>文件的前几行</translation>
        </message>
        <message>
            <source>Encoding</source>
            <translation>编码</translation>
        </message>
        <message>
            <source>Encoding: automatic</source>
            <translation>编码：自动</translation>
        </message>
        <message>
            <source>Separator</source>
            <translation>分隔符</translation>
        </message>
        <message>
            <source>Separator: automatic</source>
            <translation>分隔符：自动</translation>
        </message>
        <message>
            <source>tab</source>
            <translation>制表符</translation>
        </message>
        <message>
            <source>Sheet</source>
            <translation>工作表</translation>
        </message>
        <message>
            <source>A text file is one row</source>
            <translation>一个文本文件作为一行</translation>
        </message>
        <message>
            <source>Otherwise each line is a row</source>
            <translation>否则文件中的每一行作为一行</translation>
        </message>
        <message>
            <source>Reading the file…</source>
            <translation>正在读取文件…</translation>
        </message>
        <message>
            <source>An OpenAI batch file: rows have their own messages and settings; answers are in OpenAI's format.</source>
            <translation>OpenAI 批处理文件：各行有自己的消息和设置；回答采用 OpenAI 的格式。</translation>
        </message>
        <message>
            <source>Sheet: {0}</source>
            <translation>工作表：{0}</translation>
        </message>
        <message>
            <source>Some rows are not valid text in this encoding: choose another below the table.</source>
            <translation>有些行在此编码下不是有效文本：请在表格下方选择其他编码。</translation>
        </message>
        <message>
            <source>Some of the first rows cannot be answered: one {0}.</source>
            <translation>最初几行中有些无法回答。其中一行：{0}。</translation>
        </message>
        <message>
            <source>1 column</source>
            <translation>1 列</translation>
        </message>
        <message numerus="yes">
            <source>{0} columns</source>
            <translation>
                <numerusform>{0} 列</numerusform>
            </translation>
        </message>
        <message>
            <source>1 row</source>
            <translation>1 行</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows</source>
            <translation>
                <numerusform>{0} 行</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>Installation</name>
        <message>
            <source>The installation could not be started: install Switchyard again.</source>
            <translation>无法开始安装：请重新安装 Switchyard。</translation>
        </message>
    </context>
    <context>
        <name>JobDelegate</name>
        <message>
            <source>{0} failed</source>
            <translation>{0} 失败</translation>
        </message>
    </context>
    <context>
        <name>JobStrip</name>
        <message>
            <source>Jobs</source>
            <translation>任务</translation>
        </message>
    </context>
    <context>
        <name>Kept</name>
        <message>
            <source>{0} was damaged; it is kept as {1}, and a new one is begun.</source>
            <translation>{0} 已损坏；保留为 {1}，并新建了一个。</translation>
        </message>
        <message>
            <source>{0} could not be read ({1}): what you keep now is lost when the window closes.</source>
            <translation>无法读取 {0}（{1}）：现在保存的内容在窗口关闭后会丢失。</translation>
        </message>
        <message>
            <source>{0} could not be saved ({1}); free some space or check its permissions.</source>
            <translation>无法保存 {0}（{1}）；请腾出空间或检查权限。</translation>
        </message>
    </context>
    <context>
        <name>KeptCard</name>
        <message>
            <source>Continuing chats</source>
            <translation>继续对话</translation>
        </message>
        <message>
            <source>Clear</source>
            <translation>清除</translation>
        </message>
        <message>
            <source>Clear kept context</source>
            <translation>清除已保存的上下文</translation>
        </message>
        <message>
            <source>Now</source>
            <translation>当前</translation>
        </message>
        <message>
            <source>{0} of all chats and models together.</source>
            <translation>所有对话和模型共 {0}。</translation>
        </message>
        <message>
            <source>Nothing is kept.</source>
            <translation>没有保存任何内容。</translation>
        </message>
        <message>
            <source>The folder cannot be changed: {0}</source>
            <translation>无法更改文件夹：{0}</translation>
        </message>
    </context>
    <context>
        <name>Lane</name>
        <message>
            <source>Phase</source>
            <translation>阶段</translation>
        </message>
        <message>
            <source>What the model is doing: reading a prompt (prefill), writing an answer token by token (decode), or a batch step, which takes many rows through the model at once. Each tick is a token: a word or a part of one.</source>
            <translation>模型正在做什么：读取提示词（预填充）、逐个 token 生成回答（解码），或一步批处理，让许多行一起通过模型。每个刻度是一个 token：一个词或其一部分。</translation>
        </message>
        <message>
            <source>Requests</source>
            <translation>请求</translation>
        </message>
        <message>
            <source>A row for each answer that is being worked on, for this window or other programs, here or at another server: waiting (hatched), its prompt being read (pale), its answer being written. A batch job has a row, too (outlined).</source>
            <translation>每个进行中的回答一行，包括此窗口或其他程序的、本机或其他服务器上的：等待中（斜线）、读取提示词中（浅色）、生成回答中。批处理任务也有一行（带边框）。</translation>
        </message>
        <message>
            <source>Sweeps</source>
            <translation>遍历</translation>
        </message>
        <message>
            <source>What goes through the layers together: one token of each answer that is being written, and (hatched) pieces of prompts that are being read. Batch jobs have sweeps of their own. From close up each sweep is a block with its tokens.</source>
            <translation>一起通过各层的内容：每个生成中的回答的一个 token，以及（斜线）正在读取的提示词片段。批处理任务有自己的遍历。放大后，每次遍历是一个包含其 token 的方块。</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>How busy the graphics card is with our model. In gaps it waits for something else, usually for weights or for the processor.</source>
            <translation>我们的模型使显卡有多忙。空隙处它在等待其他东西，通常是权重或处理器。</translation>
        </message>
        <message>
            <source>computing on the GPU</source>
            <translation>在 GPU 上计算</translation>
        </message>
        <message>
            <source>To the GPU</source>
            <translation>到 GPU</translation>
        </message>
        <message>
            <source>Weights being copied from RAM to the graphics card. This is the cost of a miss: an expert that is needed but not in the card's memory.</source>
            <translation>正从内存复制到显卡的权重。这就是未命中的代价：需要的专家不在显存中。</translation>
        </message>
        <message>
            <source>copying weights to the GPU</source>
            <translation>向 GPU 复制权重</translation>
        </message>
        <message>
            <source>to the GPU</source>
            <translation>到 GPU</translation>
        </message>
        <message>
            <source>passing results to the GPU</source>
            <translation>向 GPU 传递结果</translation>
        </message>
        <message>
            <source>results</source>
            <translation>结果</translation>
        </message>
        <message>
            <source>From the GPU</source>
            <translation>从 GPU</translation>
        </message>
        <message>
            <source>Copies from the graphics card to RAM, mostly small results. Large amounts are a batch's data that has no room on the card.</source>
            <translation>从显卡到内存的复制，大多是较小的结果。大量复制则是显卡上放不下的批处理数据。</translation>
        </message>
        <message>
            <source>copying from the GPU</source>
            <translation>从 GPU 复制</translation>
        </message>
        <message>
            <source>from the GPU</source>
            <translation>从 GPU</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>How busy the processor is with our model: with experts, the parts of a layer of which each token uses only a few, and with attention, which looks back at the text so far. Together they can fill the lane.</source>
            <translation>我们的模型使处理器有多忙：专家（每层中各 token 只用其中几个的部分）和注意力（回看已有文本）。两者合起来可能占满轨道。</translation>
        </message>
        <message>
            <source>computing experts on the CPU</source>
            <translation>在 CPU 上计算专家</translation>
        </message>
        <message>
            <source>CPU experts</source>
            <translation>CPU 专家</translation>
        </message>
        <message>
            <source>attention and other layers on the CPU</source>
            <translation>CPU 上的注意力和其他层</translation>
        </message>
        <message>
            <source>CPU attention</source>
            <translation>CPU 注意力</translation>
        </message>
        <message>
            <source>Pictures</source>
            <translation>图片</translation>
        </message>
        <message>
            <source>Pictures being turned into tokens by the part of the model that sees, on the graphics card or the processor. Each is read once: the next question about it begins at once.</source>
            <translation>模型中负责看图的部分正在显卡或处理器上把图片转换为 token。每张图片只读取一次：下一个关于它的问题会立即开始。</translation>
        </message>
        <message>
            <source>reading pictures</source>
            <translation>读取图片</translation>
        </message>
        <message>
            <source>pictures</source>
            <translation>图片</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>磁盘</translation>
        </message>
        <message>
            <source>Experts being read from disk because RAM has no room for them. If this lane is often full, more RAM or a lower precision helps most.</source>
            <translation>因内存放不下而从磁盘读取的专家。如果此轨道经常占满，增加内存或降低精度最有效。</translation>
        </message>
        <message>
            <source>reading from disk</source>
            <translation>读取磁盘</translation>
        </message>
        <message>
            <source>disk</source>
            <translation>磁盘</translation>
        </message>
        <message>
            <source>Experts</source>
            <translation>专家</translation>
        </message>
        <message>
            <source>Where the needed experts were: in the card's memory (a hit), copied there first (fetched, a miss), or computed on the processor instead. More hits mean less waiting; without a graphics card everything is computed on the processor.</source>
            <translation>所需专家的位置：在显存中（命中）、先复制过去（取入，未命中），或改由处理器计算。命中越多，等待越少；没有显卡时全部由处理器计算。</translation>
        </message>
        <message>
            <source>Tokens/s</source>
            <translation>token/秒</translation>
        </message>
        <message>
            <source>How many tokens per second are written while the model is working. For a batch this counts the tokens of all rows, including their prompts.</source>
            <translation>模型工作时每秒生成多少 token。批处理时计入所有行的 token，包括提示词。</translation>
        </message>
        <message>
            <source>GPU busy</source>
            <translation>GPU 占用</translation>
        </message>
        <message>
            <source>How busy the graphics card is, for all programs.</source>
            <translation>所有程序使显卡有多忙。</translation>
        </message>
        <message>
            <source>CPU busy</source>
            <translation>CPU 占用</translation>
        </message>
        <message>
            <source>How busy the whole processor is: filled for Switchyard, dashed for all programs. A wide gap between the two is what other programs use.</source>
            <translation>整个处理器有多忙：填充部分为 Switchyard，虚线为所有程序。两者之间的差距是其他程序的占用。</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>内存</translation>
        </message>
        <message>
            <source>Memory in use: filled for Switchyard, dashed for all programs.</source>
            <translation>已用内存：填充部分为 Switchyard，虚线为所有程序。</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>显存</translation>
        </message>
        <message>
            <source>The card's memory in use: filled for Switchyard, dashed for all programs.</source>
            <translation>已用显存：填充部分为 Switchyard，虚线为所有程序。</translation>
        </message>
        <message>
            <source>PCIe</source>
            <translation>PCIe</translation>
        </message>
        <message>
            <source>Traffic on the graphics card's slot, both ways, of all programs.</source>
            <translation>显卡插槽的双向流量，所有程序。</translation>
        </message>
        <message>
            <source>Page faults</source>
            <translation>缺页</translation>
        </message>
        <message>
            <source>Memory pages that the system had to map first: many slow things down.</source>
            <translation>系统须先映射的内存页：过多会拖慢速度。</translation>
        </message>
        <message>
            <source>Disk I/O</source>
            <translation>磁盘 I/O</translation>
        </message>
        <message>
            <source>Reads from the disk and (dashed) writes to it, of all programs.</source>
            <translation>磁盘读取和（虚线）写入，所有程序。</translation>
        </message>
        <message>
            <source>GPU power</source>
            <translation>GPU 功率</translation>
        </message>
        <message>
            <source>The power that the graphics card draws.</source>
            <translation>显卡消耗的功率。</translation>
        </message>
        <message>
            <source>CPU power</source>
            <translation>CPU 功率</translation>
        </message>
        <message>
            <source>The power that the processor draws.</source>
            <translation>处理器消耗的功率。</translation>
        </message>
        <message>
            <source>GPU clock</source>
            <translation>GPU 频率</translation>
        </message>
        <message>
            <source>The graphics card's clock rate: it falls when the card is too hot.</source>
            <translation>显卡的时钟频率：过热时会下降。</translation>
        </message>
        <message>
            <source>CPU clock</source>
            <translation>CPU 频率</translation>
        </message>
        <message>
            <source>The processor's clock rate: it falls when too hot or saving power.</source>
            <translation>处理器的时钟频率：过热或节能时会下降。</translation>
        </message>
        <message>
            <source>GPU heat</source>
            <translation>GPU 温度</translation>
        </message>
        <message>
            <source>How hot the graphics card is.</source>
            <translation>显卡的温度。</translation>
        </message>
        <message>
            <source>CPU heat</source>
            <translation>CPU 温度</translation>
        </message>
        <message>
            <source>How hot the processor is.</source>
            <translation>处理器的温度。</translation>
        </message>
    </context>
    <context>
        <name>Languages</name>
        <message>
            <source>Switchyard does not speak {0} yet, so it is in English. Settings has its languages.</source>
            <translation>Switchyard 尚不支持{0}，因此显示英语。可用的语言见“设置”。</translation>
        </message>
    </context>
    <context>
        <name>LicencesDialog</name>
        <message>
            <source>Licences</source>
            <translation>许可证</translation>
        </message>
    </context>
    <context>
        <name>Loading</name>
        <message>
            <source>Opening the model</source>
            <translation>正在打开模型</translation>
        </message>
        <message>
            <source>Reading weights</source>
            <translation>正在读取权重</translation>
        </message>
        <message>
            <source>Converting weights; later starts skip this</source>
            <translation>正在转换权重；以后启动会跳过此步</translation>
        </message>
        <message>
            <source>Loading the model</source>
            <translation>正在加载模型</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} / {1}</translation>
        </message>
        <message>
            <source>{0} left</source>
            <translation>剩余 {0}</translation>
        </message>
    </context>
    <context>
        <name>MachineCard</name>
        <message>
            <source>Machine</source>
            <translation>机器</translation>
        </message>
        <message>
            <source>Sensor and driver data of the whole machine, other programs included. If the processor is much busier than our share of it, other programs are slowing the model down.</source>
            <translation>整台机器的传感器和驱动数据，包括其他程序。如果处理器的占用远高于我们的部分，说明其他程序正在拖慢模型。</translation>
        </message>
        <message>
            <source>from sensors and drivers</source>
            <translation>来自传感器和驱动</translation>
        </message>
        <message>
            <source>Graphics card: no sensor data</source>
            <translation>显卡：没有传感器数据</translation>
        </message>
        <message>
            <source>No sensor data yet.</source>
            <translation>还没有传感器数据。</translation>
        </message>
        <message>
            <source>CPU {0}%</source>
            <translation>CPU {0}%</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>ours {0}%</source>
            <translation>我们 {0}%</translation>
        </message>
        <message>
            <source>{0} GHz</source>
            <translation>{0} GHz</translation>
        </message>
        <message>
            <source>{0} °C</source>
            <translation>{0} °C</translation>
        </message>
        <message>
            <source>power not available</source>
            <translation>无法获取功耗</translation>
        </message>
        <message>
            <source>{0} W</source>
            <translation>{0} W</translation>
        </message>
        <message>
            <source>Disk {0} MB/s read, {1} MB/s written</source>
            <translation>磁盘 读 {0} MB/s，写 {1} MB/s</translation>
        </message>
        <message>
            <source>{0}% busy</source>
            <translation>占用 {0}%</translation>
        </message>
        <message>
            <source>page faults {0}/s, {1}/s from disk</source>
            <translation>缺页 {0}/秒，其中来自磁盘 {1}/秒</translation>
        </message>
    </context>
    <context>
        <name>MachineFooter</name>
        <message>
            <source>Memory</source>
            <translation>内存</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>内存</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>显存</translation>
        </message>
        <message>
            <source>No GPU in use</source>
            <translation>未使用 GPU</translation>
        </message>
        <message>
            <source>Show what holds the memory</source>
            <translation>显示内存占用</translation>
        </message>
        <message>
            <source>Fold the memory into one bar</source>
            <translation>将内存折叠为一条</translation>
        </message>
        <message>
            <source>Model: the weights that every token needs. Its experts: those of which each token needs a few. Chat memory: keys and values of conversations (KV). These figures are the engine's; RAM in use and in all are the operating system's.</source>
            <translation>模型：每个 token 都需要的权重。其专家：每个 token 只需其中几个。对话内存：对话的键和值（KV）。这些数字来自引擎；已用和总内存来自操作系统。</translation>
        </message>
        <message>
            <source>VRAM in use and total: from the driver.</source>
            <translation>已用和总显存：来自驱动。</translation>
        </message>
        <message>
            <source>Memory of the emulated graphics card: from the engine.</source>
            <translation>模拟显卡的显存：来自引擎。</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>模型</translation>
        </message>
        <message>
            <source>Its experts</source>
            <translation>其专家</translation>
        </message>
        <message>
            <source>Chat memory</source>
            <translation>对话内存</translation>
        </message>
        <message>
            <source>Switchyard</source>
            <translation>Switchyard</translation>
        </message>
        <message>
            <source>Other programs</source>
            <translation>其他程序</translation>
        </message>
        <message>
            <source>1 core</source>
            <translation>1 核</translation>
        </message>
        <message numerus="yes">
            <source>{0} cores</source>
            <translation>
                <numerusform>{0} 核</numerusform>
            </translation>
        </message>
        <message>
            <source>{0}, not in use</source>
            <translation>{0}，未使用</translation>
        </message>
        <message>
            <source>1 thread</source>
            <translation>1 个线程</translation>
        </message>
        <message numerus="yes">
            <source>{0} threads</source>
            <translation>
                <numerusform>{0} 个线程</numerusform>
            </translation>
        </message>
        <message>
            <source>tuned</source>
            <translation>已调优</translation>
        </message>
        <message>
            <source>Where the model runs, as reported by the engine.</source>
            <translation>引擎报告的模型运行位置。</translation>
        </message>
        <message>
            <source>Loading the model</source>
            <translation>正在加载模型</translation>
        </message>
        <message>
            <source>Loading the model, {0}%</source>
            <translation>正在加载模型，{0}%</translation>
        </message>
        <message>
            <source>Starting the engine</source>
            <translation>正在启动引擎</translation>
        </message>
        <message>
            <source>No model loaded</source>
            <translation>未加载模型</translation>
        </message>
    </context>
    <context>
        <name>MachinePicture</name>
        <message>
            <source>Picture of this machine</source>
            <translation>本机示意图</translation>
        </message>
    </context>
    <context>
        <name>MainWindow</name>
        <message>
            <source>Switchyard {0} is available: get it in Settings.</source>
            <translation>Switchyard {0} 已发布：可在“设置”中获取。</translation>
        </message>
        <message>
            <source>Everywhere</source>
            <translation>所有位置</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>已复制</translation>
        </message>
        <message>
            <source>The report is in {0}.</source>
            <translation>报告位于 {0}。</translation>
        </message>
        <message>
            <source>Copy report</source>
            <translation>复制报告</translation>
        </message>
        <message>
            <source>Save report…</source>
            <translation>保存报告…</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>关闭</translation>
        </message>
        <message>
            <source>Switchyard hit an error last time. You can copy a report of it, or save one with versions, hardware and logs; neither has prompts, answers or names, and nothing was sent.</source>
            <translation>Switchyard 上次出现了错误。您可以复制错误报告，或保存一份包含版本、硬件和日志的报告；两者都不含提示词、回答或姓名，也没有发送任何内容。</translation>
        </message>
        <message>
            <source>{0} Your text is kept.</source>
            <translation>{0} 您的文本已保留。</translation>
        </message>
        <message>
            <source>Your hardware has changed since the last tuning. {0}</source>
            <translation>自上次调优以来硬件有变化。{0}</translation>
        </message>
        <message>
            <source>{0} now runs at {1} tokens/s, much faster than the {2} that Tune measured: the machine was busy then. Tune again to find the best settings.</source>
            <translation>{0} 现在以 {1} token/秒运行，远快于调优时实测的 {2}：当时机器正忙。请重新调优以找到最佳设置。</translation>
        </message>
        <message>
            <source>The graphics card works again, but the model still runs on the CPU: reload it to use the card.</source>
            <translation>显卡已恢复正常，但模型仍在 CPU 上运行：要使用显卡，请重新加载模型。</translation>
        </message>
        <message>
            <source>Restart engine</source>
            <translation>重启引擎</translation>
        </message>
        <message>
            <source>Models</source>
            <translation>模型</translation>
        </message>
        <message>
            <source>Tune</source>
            <translation>调优</translation>
        </message>
        <message>
            <source>Reload model</source>
            <translation>重新加载模型</translation>
        </message>
        <message>
            <source>Show these shortcuts</source>
            <translation>显示这些快捷键</translation>
        </message>
        <message>
            <source>Quit</source>
            <translation>退出</translation>
        </message>
    </context>
    <context>
        <name>MakingRoom</name>
        <message>
            <source>A batch job is running.</source>
            <translation>有一个批处理任务正在运行。</translation>
        </message>
        <message>
            <source>Tuning needs the engine to itself, so the job is paused and resumes when tuning ends. No answered row is lost.</source>
            <translation>调优需要独占引擎，因此任务会暂停，并在调优结束后继续。已回答的行不会丢失。</translation>
        </message>
        <message>
            <source>Pause it and tune</source>
            <translation>暂停并调优</translation>
        </message>
        <message numerus="yes">
            <source>{0} batch jobs are running.</source>
            <translation>
                <numerusform>有 {0} 个批处理任务正在运行。</numerusform>
            </translation>
        </message>
        <message>
            <source>Tuning needs the engine to itself, so the jobs are paused and resume when tuning ends. No answered row is lost.</source>
            <translation>调优需要独占引擎，因此这些任务会暂停，并在调优结束后继续。已回答的行不会丢失。</translation>
        </message>
        <message>
            <source>Pause them and tune</source>
            <translation>暂停并调优</translation>
        </message>
        <message>
            <source>An answer is being written.</source>
            <translation>正在生成回答。</translation>
        </message>
        <message>
            <source>Tuning needs the engine to itself. A stopped answer keeps its text so far.</source>
            <translation>调优需要独占引擎。停止的回答会保留已有文本。</translation>
        </message>
        <message>
            <source>Tune after the answer</source>
            <translation>回答完成后调优</translation>
        </message>
        <message>
            <source>Stop the answer</source>
            <translation>停止回答</translation>
        </message>
        <message>
            <source>The batch job for {0} stays paused: it began in {1}, and the model now runs in {2}. “Keep as before” lets you resume it.</source>
            <translation>{0} 的批处理任务仍处于暂停：它以 {1} 开始，而模型现在以 {2} 运行。选择“保持原样”即可继续。</translation>
        </message>
    </context>
    <context>
        <name>MapLegend</name>
        <message>
            <source>Recent uses: each counts half as much after 128 tokens</source>
            <translation>近期使用：128 个 token 之后，每次使用的权重减半</translation>
        </message>
        <message>
            <source>in VRAM</source>
            <translation>在显存中</translation>
        </message>
        <message>
            <source>in RAM</source>
            <translation>在内存中</translation>
        </message>
        <message>
            <source>only on disk</source>
            <translation>仅在磁盘上</translation>
        </message>
        <message>
            <source>fetching</source>
            <translation>取入中</translation>
        </message>
        <message>
            <source>Dark to yellow: 0 to {0} recent uses</source>
            <translation>从深色到黄色：近期使用 0 至 {0}</translation>
        </message>
        <message>
            <source>recent uses 0</source>
            <translation>近期使用 0</translation>
        </message>
    </context>
    <context>
        <name>MemoryCard</name>
        <message>
            <source>Memory</source>
            <translation>内存</translation>
        </message>
        <message>
            <source>What fills the computer's memory and its graphics card's. Weights and experts are the model itself; KV (keys and values) is what it remembers of the conversation, and grows with its length. Kept context is that of other conversations, which go on at once with it.</source>
            <translation>电脑内存和显存的占用情况。权重和专家是模型本身；KV（键和值）是模型对对话的记忆，随对话变长而增大。已保存的上下文属于其他对话，可使其立即接着进行。</translation>
        </message>
        <message>
            <source>Shows a model's memory once one is loaded.</source>
            <translation>加载模型后显示其内存占用。</translation>
        </message>
        <message>
            <source>Parts of the model: counted by the engine. Total RAM: reported by the system.</source>
            <translation>模型各部分：由引擎统计。总内存：由系统报告。</translation>
        </message>
        <message>
            <source>Computed context of chats, of all models, of what it may take (see Settings).</source>
            <translation>所有模型的对话已计算的上下文，相对于允许占用的空间（见“设置”）。</translation>
        </message>
        <message>
            <source>Counted by the engine, of the memory it may use.</source>
            <translation>由引擎统计，相对于其可用内存。</translation>
        </message>
        <message>
            <source>free</source>
            <translation>空闲</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>内存</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>磁盘</translation>
        </message>
        <message>
            <source>VRAM (emulated)</source>
            <translation>显存（模拟）</translation>
        </message>
        <message>
            <source>VRAM {0}</source>
            <translation>显存 {0}</translation>
        </message>
        <message>
            <source>weights</source>
            <translation>权重</translation>
        </message>
        <message>
            <source>experts</source>
            <translation>专家</translation>
        </message>
        <message>
            <source>conversation (KV)</source>
            <translation>对话（KV）</translation>
        </message>
        <message>
            <source>kept context</source>
            <translation>已保存的上下文</translation>
        </message>
        <message>
            <source>staging</source>
            <translation>传输缓冲</translation>
        </message>
        <message>
            <source>activations</source>
            <translation>激活值</translation>
        </message>
        <message>
            <source>reading pictures</source>
            <translation>读取图片</translation>
        </message>
        <message>
            <source>the engine itself</source>
            <translation>引擎自身</translation>
        </message>
        <message>
            <source>window and other programs</source>
            <translation>窗口和其他程序</translation>
        </message>
    </context>
    <context>
        <name>MessageEditor</name>
        <message>
            <source>Cancel</source>
            <translation>取消</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>保存</translation>
        </message>
        <message>
            <source>Ctrl+Enter</source>
            <translation>Ctrl+Enter</translation>
        </message>
    </context>
    <context>
        <name>MessageTools</name>
        <message>
            <source>Saved prompts  /</source>
            <translation>已保存的提示词  /</translation>
        </message>
        <message>
            <source>More for this message</source>
            <translation>此消息的更多操作</translation>
        </message>
        <message>
            <source>Saved prompts…	/</source>
            <translation>已保存的提示词…	/</translation>
        </message>
        <message>
            <source>Save this message as a prompt…</source>
            <translation>将此消息保存为提示词…</translation>
        </message>
        <message>
            <source>Ask two, side by side…	Ctrl+Shift+D</source>
            <translation>同时询问两个…	Ctrl+Shift+D</translation>
        </message>
        <message>
            <source>Ask this of every row of a file…</source>
            <translation>对文件的每一行提问…</translation>
        </message>
    </context>
    <context>
        <name>MissRatioPlot</name>
        <message>
            <source>{0}%</source>
            <translation>{0}%</translation>
        </message>
        <message>
            <source>no room</source>
            <translation>没有空间</translation>
        </message>
        <message>
            <source>Miss-ratio curve</source>
            <translation>未命中率曲线</translation>
        </message>
        <message>
            <source>Drag the handle to resize the cache. Hatched: more than the free memory.</source>
            <translation>拖动手柄可调整缓存大小。斜线区域：超出空闲内存。</translation>
        </message>
        <message>
            <source>{0} experts</source>
            <translation>{0} 个专家</translation>
        </message>
        <message>
            <source>hits about {0}%</source>
            <translation>命中约 {0}%</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} token/秒</translation>
        </message>
        <message>
            <source>Left and right move the handle, Enter resizes the cache, Escape resets the handle.</source>
            <translation>左右键移动手柄，Enter 调整缓存大小，Esc 复位手柄。</translation>
        </message>
        <message>
            <source>experts kept, of {0}</source>
            <translation>保留的专家，共 {0} 个</translation>
        </message>
        <message>
            <source>hits, expected</source>
            <translation>命中，预计</translation>
        </message>
        <message>
            <source>LRU</source>
            <translation>LRU</translation>
        </message>
        <message>
            <source>tokens/s, predicted</source>
            <translation>token/秒，预测</translation>
        </message>
        <message>
            <source>too few tokens for a curve</source>
            <translation>token 太少，无法绘制曲线</translation>
        </message>
        <message>
            <source>now</source>
            <translation>当前</translation>
        </message>
    </context>
    <context>
        <name>ModelCard</name>
        <message>
            <source>Tune…</source>
            <translation>调优…</translation>
        </message>
        <message>
            <source>Speed</source>
            <translation>速度</translation>
        </message>
        <message>
            <source>Times this machine and keeps the fastest settings.</source>
            <translation>测试本机速度并保留最快的设置。</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>入门模型</translation>
        </message>
    </context>
    <context>
        <name>ModelDialog</name>
        <message>
            <source>Models (*.gguf *.safetensors config.json)</source>
            <translation>模型 (*.gguf *.safetensors config.json)</translation>
        </message>
        <message>
            <source>Open a model file</source>
            <translation>打开模型文件</translation>
        </message>
    </context>
    <context>
        <name>ModelPicker</name>
        <message>
            <source>Models</source>
            <translation>模型</translation>
        </message>
        <message>
            <source>Find a model</source>
            <translation>查找模型</translation>
        </message>
        <message>
            <source>Loading the model</source>
            <translation>正在加载模型</translation>
        </message>
        <message>
            <source>Cancel loading</source>
            <translation>取消加载</translation>
        </message>
        <message>
            <source>Set as default</source>
            <translation>设为默认</translation>
        </message>
        <message>
            <source>Open a model file…</source>
            <translation>打开模型文件…</translation>
        </message>
        <message>
            <source>Get more models…</source>
            <translation>获取更多模型…</translation>
        </message>
        <message>
            <source>Up, Down, Enter</source>
            <translation>↑、↓、Enter</translation>
        </message>
        <message>
            <source>Choose a model in the list, and load it</source>
            <translation>在列表中选择模型并加载</translation>
        </message>
        <message>
            <source>Remote servers</source>
            <translation>远程服务器</translation>
        </message>
        <message>
            <source>No model is on this PC yet.</source>
            <translation>这台电脑上还没有模型。</translation>
        </message>
        <message>
            <source>Looking for models…</source>
            <translation>正在查找模型…</translation>
        </message>
        <message>
            <source>No model has that name.</source>
            <translation>没有这个名称的模型。</translation>
        </message>
        <message>
            <source>Use in this chat</source>
            <translation>在此对话中使用</translation>
        </message>
        <message>
            <source>Unload</source>
            <translation>卸载</translation>
        </message>
        <message>
            <source>Load</source>
            <translation>加载</translation>
        </message>
        <message>
            <source>Frees the memory that the model takes</source>
            <translation>释放模型占用的内存</translation>
        </message>
        <message>
            <source>Use in new chats</source>
            <translation>在新对话中使用</translation>
        </message>
        <message>
            <source>New chats begin with it; chats that are there stay as they are</source>
            <translation>新对话将使用该模型；已有对话保持不变</translation>
        </message>
        <message>
            <source>Loaded whenever Switchyard starts</source>
            <translation>每次启动 Switchyard 时加载</translation>
        </message>
    </context>
    <context>
        <name>ModelTable</name>
        <message>
            <source>Load the model</source>
            <translation>加载模型</translation>
        </message>
        <message>
            <source>Remove the model</source>
            <translation>移除模型</translation>
        </message>
    </context>
    <context>
        <name>Models</name>
        <message>
            <source>Switchyard</source>
            <translation>Switchyard</translation>
        </message>
        <message>
            <source>Hub cache</source>
            <translation>Hub 缓存</translation>
        </message>
        <message>
            <source>Your folder</source>
            <translation>您的文件夹</translation>
        </message>
        <message>
            <source>also in {0}</source>
            <translation>也在 {0}</translation>
        </message>
        <message>
            <source>damaged</source>
            <translation>已损坏</translation>
        </message>
        <message>
            <source>{0} tokens/s measured</source>
            <translation>实测 {0} token/秒</translation>
        </message>
        <message>
            <source>about {0} tokens/s predicted</source>
            <translation>预测约 {0} token/秒</translation>
        </message>
        <message>
            <source>never</source>
            <translation>从未</translation>
        </message>
        <message>
            <source>today</source>
            <translation>今天</translation>
        </message>
        <message>
            <source>yesterday</source>
            <translation>昨天</translation>
        </message>
        <message numerus="yes">
            <source>{0} days ago</source>
            <translation>
                <numerusform>{0} 天前</numerusform>
            </translation>
        </message>
        <message>
            <source>loaded</source>
            <translation>已加载</translation>
        </message>
        <message>
            <source>default</source>
            <translation>默认</translation>
        </message>
        <message>
            <source>pictures</source>
            <translation>图片</translation>
        </message>
        <message>
            <source>tools</source>
            <translation>工具</translation>
        </message>
        <message>
            <source>thinks</source>
            <translation>思考</translation>
        </message>
        <message>
            <source>embeddings</source>
            <translation>嵌入</translation>
        </message>
        <message>
            <source>Sees pictures</source>
            <translation>能看图片</translation>
        </message>
        <message>
            <source>Calls tools</source>
            <translation>能调用工具</translation>
        </message>
        <message>
            <source>Thinks first</source>
            <translation>先思考</translation>
        </message>
        <message>
            <source>Embeds texts</source>
            <translation>能生成文本嵌入</translation>
        </message>
        <message>
            <source>last used: {0}</source>
            <translation>上次使用：{0}</translation>
        </message>
        <message>
            <source>{0} B parameters</source>
            <translation>{0}B 参数</translation>
        </message>
        <message>
            <source>{0} experts, {1} per token</source>
            <translation>{0} 个专家，每 token {1} 个</translation>
        </message>
        <message>
            <source>context {0}</source>
            <translation>上下文 {0}</translation>
        </message>
        <message>
            <source>used {0}</source>
            <translation>使用：{0}</translation>
        </message>
        <message>
            <source>converted weights {0}</source>
            <translation>已转换的权重 {0}</translation>
        </message>
        <message>
            <source>Verifying {0}</source>
            <translation>正在校验 {0}</translation>
        </message>
        <message>
            <source>Moving {0}</source>
            <translation>正在移动 {0}</translation>
        </message>
        <message>
            <source>Copying {0}</source>
            <translation>正在复制 {0}</translation>
        </message>
        <message>
            <source>Importing {0}</source>
            <translation>正在导入 {0}</translation>
        </message>
        <message>
            <source>Removing {0}</source>
            <translation>正在移除 {0}</translation>
        </message>
        <message>
            <source>Deleting the converted weights of {0}</source>
            <translation>正在删除 {0} 的已转换权重</translation>
        </message>
        <message>
            <source>{0} was imported.</source>
            <translation>已导入 {0}。</translation>
        </message>
        <message>
            <source>{0} is now in {1}.</source>
            <translation>{0} 现在位于 {1}。</translation>
        </message>
        <message>
            <source>{0} was copied to {1}.</source>
            <translation>{0} 已复制到 {1}。</translation>
        </message>
        <message>
            <source>{0} is in the trash ({1}).</source>
            <translation>{0} 已移到回收站（{1}）。</translation>
        </message>
        <message>
            <source>Everything else in {0} stays there.</source>
            <translation>{0} 中的其他内容保持不变。</translation>
        </message>
        <message>
            <source>{0} were freed; loading {1} converts its weights again.</source>
            <translation>已释放 {0}；加载 {1} 时会重新转换权重。</translation>
        </message>
        <message>
            <source>{0} is damaged, download it again: {1}</source>
            <translation>{0} 已损坏，请重新下载：{1}</translation>
        </message>
        <message>
            <source>{0} is intact: every file has its checksum.</source>
            <translation>{0} 完好：每个文件的校验和都一致。</translation>
        </message>
        <message>
            <source>{0} is complete; there are no checksums to compare with.</source>
            <translation>{0} 完整；没有可供比较的校验和。</translation>
        </message>
        <message>
            <source>Code</source>
            <translation>代码</translation>
        </message>
        <message>
            <source>Tools</source>
            <translation>工具</translation>
        </message>
        <message>
            <source>Pictures</source>
            <translation>图片</translation>
        </message>
        <message>
            <source>Embeddings</source>
            <translation>嵌入</translation>
        </message>
        <message>
            <source>Long documents</source>
            <translation>长文档</translation>
        </message>
        <message>
            <source>Many languages</source>
            <translation>多语言</translation>
        </message>
        <message>
            <source>{0} B parameters, {1} B for each token</source>
            <translation>{0}B 参数，每 token {1}B</translation>
        </message>
        <message>
            <source>{0} B</source>
            <translation>{0}B</translation>
        </message>
        <message>
            <source>gated</source>
            <translation>需授权</translation>
        </message>
        <message>
            <source>{0} downloads</source>
            <translation>{0} 次下载</translation>
        </message>
        <message>
            <source>{0} M</source>
            <translation>{0}M</translation>
        </message>
        <message>
            <source>{0} k</source>
            <translation>{0}k</translation>
        </message>
    </context>
    <context>
        <name>ModelsPage</name>
        <message>
            <source>Models</source>
            <translation>模型</translation>
        </message>
        <message>
            <source>Folders…</source>
            <translation>文件夹…</translation>
        </message>
        <message>
            <source>Import…</source>
            <translation>导入…</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>关闭</translation>
        </message>
        <message>
            <source>It frees {0} once the trash is emptied. Its converted weights are deleted.</source>
            <translation>清空回收站后可释放 {0}。其已转换的权重会被删除。</translation>
        </message>
        <message>
            <source>This is the copy in {0}. The one in {1} stays, and is listed instead.</source>
            <translation>这是 {0} 中的副本。{1} 中的会保留，并改为列出。</translation>
        </message>
        <message>
            <source>Move {0} to the trash?</source>
            <translation>要将 {0} 移到回收站吗？</translation>
        </message>
        <message>
            <source>Move to the trash</source>
            <translation>移到回收站</translation>
        </message>
        <message>
            <source>Load {0} anyway?</source>
            <translation>仍然加载 {0} 吗？</translation>
        </message>
        <message>
            <source>Download {0} and load it</source>
            <translation>下载 {0} 并加载</translation>
        </message>
        <message>
            <source>{0} is being downloaded; it goes on when you leave this page.</source>
            <translation>正在下载 {0}；离开此页后仍会继续。</translation>
        </message>
        <message>
            <source>{0} is on this PC now.</source>
            <translation>{0} 已在这台电脑上。</translation>
        </message>
        <message>
            <source>Load it</source>
            <translation>加载</translation>
        </message>
        <message>
            <source>Folder to move it to</source>
            <translation>目标文件夹</translation>
        </message>
        <message>
            <source>Folder for the copy</source>
            <translation>存放副本的文件夹</translation>
        </message>
        <message>
            <source>Search the hub</source>
            <translation>搜索 Hub</translation>
        </message>
        <message>
            <source>Import a model</source>
            <translation>导入模型</translation>
        </message>
    </context>
    <context>
        <name>MonitorPage</name>
        <message>
            <source>Monitor</source>
            <translation>监视器</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>关闭</translation>
        </message>
        <message>
            <source>Back to live</source>
            <translation>返回实时</translation>
        </message>
        <message>
            <source>Hide lanes and figures</source>
            <translation>隐藏时间线和数据</translation>
        </message>
        <message>
            <source>Show lanes, caches and memory in detail</source>
            <translation>显示时间线、缓存和内存的详情</translation>
        </message>
        <message>
            <source>A recorded session: {0}.</source>
            <translation>录制的会话：{0}。</translation>
        </message>
        <message>
            <source>It ends early; everything intact is shown.</source>
            <translation>它提前结束；完好的内容都已显示。</translation>
        </message>
        <message>
            <source>Compared with</source>
            <translation>对比</translation>
        </message>
    </context>
    <context>
        <name>NewJob</name>
        <message>
            <source>No model is loaded.</source>
            <translation>未加载模型。</translation>
        </message>
        <message>
            <source>The job starts when a model is loaded.</source>
            <translation>加载模型后任务开始。</translation>
        </message>
        <message>
            <source>A trial of the first rows says how long a row takes there, and what it costs.</source>
            <translation>试运行最初几行，即可知道那里每行需要多久、费用多少。</translation>
        </message>
        <message>
            <source>Each node plans for itself; how fast it is shows when rows are answered.</source>
            <translation>每个节点自行规划；开始回答后才能看出速度。</translation>
        </message>
    </context>
    <context>
        <name>NumbersCard</name>
        <message>
            <source>Measurements</source>
            <translation>测量值</translation>
        </message>
        <message>
            <source>Not measured yet. Numbers with “about” are assumed, from data sheets of similar hardware; measuring takes ten seconds.</source>
            <translation>尚未测量。带“约”的数字是根据同类硬件的规格假设的；测量需要十秒。</translation>
        </message>
        <message>
            <source>quick</source>
            <translation>快速</translation>
        </message>
        <message>
            <source>thorough</source>
            <translation>详细</translation>
        </message>
        <message>
            <source>Measured on {0}, {1}. The best of each kind:</source>
            <translation>测量于 {0}，{1}。每类的最佳值：</translation>
        </message>
        <message>
            <source>Skipped: {0} ({1}).</source>
            <translation>已跳过：{0}（{1}）。</translation>
        </message>
        <message>
            <source>{0} varied by {1}% in every repeat.</source>
            <translation>{0} 每次重复的波动为 {1}%。</translation>
        </message>
        <message>
            <source>Each is measured several times; the best of each kind so far:</source>
            <translation>每项测量多次；目前每类的最佳值：</translation>
        </message>
        <message>
            <source>Numbers appear here as they are measured.</source>
            <translation>测得的数字会显示在这里。</translation>
        </message>
    </context>
    <context>
        <name>OfferView</name>
        <message>
            <source>≈ Size from the catalogue, not checked with the hub.</source>
            <translation>≈ 目录中的大小，未向 Hub 核实。</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>下载</translation>
        </message>
        <message>
            <source>All files…</source>
            <translation>所有文件…</translation>
        </message>
        <message>
            <source>All files of {0}</source>
            <translation>{0} 的所有文件</translation>
        </message>
    </context>
    <context>
        <name>OnThisPcCard</name>
        <message>
            <source>On this PC</source>
            <translation>在这台电脑上</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>模型</translation>
        </message>
        <message>
            <source>From</source>
            <translation>来源</translation>
        </message>
        <message>
            <source>Size</source>
            <translation>大小</translation>
        </message>
        <message>
            <source>Precision</source>
            <translation>精度</translation>
        </message>
        <message>
            <source>Tokens/s</source>
            <translation>token/秒</translation>
        </message>
        <message>
            <source>Used</source>
            <translation>使用</translation>
        </message>
        <message>
            <source>What a model can do</source>
            <translation>模型的能力</translation>
        </message>
        <message>
            <source>Any ability</source>
            <translation>任意能力</translation>
        </message>
        <message>
            <source>Models on this PC</source>
            <translation>这台电脑上的模型</translation>
        </message>
        <message>
            <source>Load</source>
            <translation>加载</translation>
        </message>
        <message>
            <source>Unload</source>
            <translation>卸载</translation>
        </message>
        <message>
            <source>Set as default</source>
            <translation>设为默认</translation>
        </message>
        <message>
            <source>More</source>
            <translation>更多</translation>
        </message>
        <message>
            <source>Verify files</source>
            <translation>校验文件</translation>
        </message>
        <message>
            <source>Show in folder</source>
            <translation>在文件夹中显示</translation>
        </message>
        <message>
            <source>Move to another folder…</source>
            <translation>移到其他文件夹…</translation>
        </message>
        <message>
            <source>Export a copy…</source>
            <translation>导出副本…</translation>
        </message>
        <message>
            <source>Remove…</source>
            <translation>移除…</translation>
        </message>
        <message>
            <source>No model is here yet: take one that suits this PC.</source>
            <translation>这里还没有模型：请选一个适合这台电脑的。</translation>
        </message>
        <message>
            <source>No model here can do that.</source>
            <translation>这里没有带此标记的模型。</translation>
        </message>
        <message>
            <source>1 model</source>
            <translation>1 个模型</translation>
        </message>
        <message numerus="yes">
            <source>{0} models</source>
            <translation>
                <numerusform>{0} 个模型</numerusform>
            </translation>
        </message>
        <message>
            <source>Default</source>
            <translation>默认</translation>
        </message>
        <message>
            <source>Delete converted weights ({0})</source>
            <translation>删除已转换的权重（{0}）</translation>
        </message>
        <message>
            <source>Unload it first.</source>
            <translation>请先卸载。</translation>
        </message>
        <message>
            <source>It is used where it lies: remove it there.</source>
            <translation>该模型就地使用：请在其所在位置移除。</translation>
        </message>
    </context>
    <context>
        <name>OtherProgramsCard</name>
        <message>
            <source>How programs reach it</source>
            <translation>程序如何访问</translation>
        </message>
        <message>
            <source>Copy address</source>
            <translation>复制地址</translation>
        </message>
        <message>
            <source>Address</source>
            <translation>地址</translation>
        </message>
        <message>
            <source>Show</source>
            <translation>显示</translation>
        </message>
        <message>
            <source>Show the key</source>
            <translation>显示密钥</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>复制</translation>
        </message>
        <message>
            <source>Copy the key</source>
            <translation>复制密钥</translation>
        </message>
        <message>
            <source>New key</source>
            <translation>新密钥</translation>
        </message>
        <message>
            <source>Free</source>
            <translation>释放</translation>
        </message>
        <message>
            <source>Models asked for by name</source>
            <translation>按名称请求的模型</translation>
        </message>
        <message>
            <source>Copy example</source>
            <translation>复制示例</translation>
        </message>
        <message>
            <source>OpenAI's interface is at /v1; programs for Anthropic or Ollama take the address alone.</source>
            <translation>OpenAI 接口位于 /v1；用于 Anthropic 或 Ollama 的程序只需地址。</translation>
        </message>
        <message>
            <source>Example</source>
            <translation>示例</translation>
        </message>
        <message>
            <source>Requests</source>
            <translation>请求</translation>
        </message>
        <message>
            <source>Key</source>
            <translation>密钥</translation>
        </message>
        <message>
            <source>Off. Nothing listens, and no editor, agent or other app can ask.</source>
            <translation>已关闭。没有监听，任何编辑器、智能体或其他应用都无法访问。</translation>
        </message>
        <message>
            <source>Starting…</source>
            <translation>正在启动…</translation>
        </message>
        <message>
            <source>On, for all models on this PC. Chats in this window come first.</source>
            <translation>已开启，适用于这台电脑上的所有模型。此窗口的对话优先。</translation>
        </message>
        <message>
            <source>Off, because of a problem.</source>
            <translation>因出现问题而关闭。</translation>
        </message>
        <message>
            <source>No other PC can reach it. Any program here can.</source>
            <translation>其他电脑无法访问。本机的任何程序都可以访问。</translation>
        </message>
        <message>
            <source>No other PC can reach it. Programs here need the key.</source>
            <translation>其他电脑无法访问。本机程序需要密钥。</translation>
        </message>
        <message>
            <source>What is asked and answered crosses your network unencrypted: use it only at home.</source>
            <translation>问题和回答会以未加密方式经过您的网络：请仅在家中使用。</translation>
        </message>
        <message>
            <source>{0} is being loaded.</source>
            <translation>正在加载 {0}。</translation>
        </message>
        <message>
            <source>{0} is loaded.</source>
            <translation>{0} 已加载。</translation>
        </message>
        <message>
            <source>Any model on this PC: it is loaded beside yours, one at a time.</source>
            <translation>这台电脑上的任何模型：与您的模型一同加载，一次一个。</translation>
        </message>
        <message>
            <source>In the system's keyring.</source>
            <translation>在系统密钥环中。</translation>
        </message>
        <message>
            <source>For this run only: this system has no keyring.</source>
            <translation>仅限本次运行：此系统没有密钥环。</translation>
        </message>
        <message>
            <source>Since the window opened; what was asked and answered is not kept.</source>
            <translation>自窗口打开以来的记录；不保存问题和回答的内容。</translation>
        </message>
        <message>
            <source>None yet.</source>
            <translation>暂无。</translation>
        </message>
    </context>
    <context>
        <name>OutputCard</name>
        <message>
            <source>Result file</source>
            <translation>结果文件</translation>
        </message>
        <message>
            <source>Name of the result file</source>
            <translation>结果文件的名称</translation>
        </message>
        <message>
            <source>File type</source>
            <translation>文件类型</translation>
        </message>
        <message>
            <source>Another folder…</source>
            <translation>其他文件夹…</translation>
        </message>
        <message>
            <source>In</source>
            <translation>位于</translation>
        </message>
        <message>
            <source>In OpenAI's output format; rows that fail go into an error file beside it.</source>
            <translation>采用 OpenAI 的输出格式；失败的行写入旁边的错误文件。</translation>
        </message>
        <message>
            <source>Keeps the input's columns; adds the answer, how it ended, token counts and, for failed rows, why.</source>
            <translation>保留输入的各列；并添加回答、结束方式、token 数，失败的行还会注明原因。</translation>
        </message>
        <message>
            <source>Name the result file.</source>
            <translation>请为结果文件命名。</translation>
        </message>
        <message>
            <source>The result file's name contains a slash: choose the folder beside it instead.</source>
            <translation>结果文件的名称包含斜杠：请改用旁边的文件夹选项。</translation>
        </message>
        <message>
            <source>Folder of the result file</source>
            <translation>结果文件所在的文件夹</translation>
        </message>
    </context>
    <context>
        <name>Pages</name>
        <message>
            <source>Chat</source>
            <translation>对话</translation>
        </message>
        <message>
            <source>Batch</source>
            <translation>批处理</translation>
        </message>
        <message>
            <source>Monitor</source>
            <translation>监视器</translation>
        </message>
        <message>
            <source>Tune</source>
            <translation>调优</translation>
        </message>
        <message>
            <source>Models</source>
            <translation>模型</translation>
        </message>
        <message>
            <source>Settings</source>
            <translation>设置</translation>
        </message>
        <message>
            <source>Choose a first model</source>
            <translation>选择第一个模型</translation>
        </message>
    </context>
    <context>
        <name>PassageDialog</name>
        <message>
            <source>Source {0}</source>
            <translation>来源 {0}</translation>
        </message>
        <message>
            <source>Document</source>
            <translation>文档</translation>
        </message>
        <message>
            <source>The passage and what stands around it</source>
            <translation>该段落及其前后内容</translation>
        </message>
        <message>
            <source>Looking for the passage…</source>
            <translation>正在查找该段落…</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>关闭</translation>
        </message>
        <message>
            <source>This passage is no longer there: the document has changed or was removed since.</source>
            <translation>该段落已不存在：文档此后被修改或移除。</translation>
        </message>
    </context>
    <context>
        <name>PictureRow</name>
        <message>
            <source>Remove picture {0}</source>
            <translation>移除图片 {0}</translation>
        </message>
        <message>
            <source>damaged picture</source>
            <translation>损坏的图片</translation>
        </message>
        <message>
            <source>Picture {0} of {1}</source>
            <translation>图片 {0} / {1}</translation>
        </message>
        <message>
            <source>{0}, {1} by {2} pixels</source>
            <translation>{0}，{1} × {2} 像素</translation>
        </message>
    </context>
    <context>
        <name>Pictures</name>
        <message>
            <source>A message takes up to {0} pictures.</source>
            <translation>一条消息最多可附 {0} 张图片。</translation>
        </message>
        <message>
            <source>A chat takes {0} of pictures: start a new chat for more.</source>
            <translation>一个对话最多可含 {0} 的图片：要添加更多，请开始新对话。</translation>
        </message>
        <message>
            <source>{0} is not a file.</source>
            <translation>{0} 不是文件。</translation>
        </message>
        <message>
            <source>{0} cannot be read ({1}).</source>
            <translation>无法读取 {0}（{1}）。</translation>
        </message>
        <message>
            <source>{0} is larger than {1}: make it smaller first.</source>
            <translation>{0} 超过 {1}：请先缩小。</translation>
        </message>
        <message>
            <source>{0} is damaged and cannot be shown.</source>
            <translation>{0} 已损坏，无法显示。</translation>
        </message>
        <message>
            <source>{0} is in the {1} format, which is not read here: save it as PNG or JPEG.</source>
            <translation>{0} 是 {1} 格式，这里无法读取：请另存为 PNG 或 JPEG。</translation>
        </message>
        <message>
            <source>{0} is not a PNG, JPEG, WebP or GIF picture.</source>
            <translation>{0} 不是 PNG、JPEG、WebP 或 GIF 图片。</translation>
        </message>
        <message>
            <source>{0} has too many pixels: make it smaller first.</source>
            <translation>{0} 的像素过多：请先缩小。</translation>
        </message>
    </context>
    <context>
        <name>PlaceRows</name>
        <message>
            <source>Who answers the rows</source>
            <translation>由谁回答各行</translation>
        </message>
        <message>
            <source>1 row</source>
            <translation>1 行</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows</source>
            <translation>
                <numerusform>{0} 行</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>PlacesCard</name>
        <message>
            <source>Answered by</source>
            <translation>回答者</translation>
        </message>
        <message>
            <source>Ask two for slow last rows</source>
            <translation>最后较慢的行询问两台</translation>
        </message>
        <message>
            <source>Near the end, a row that one server is slow with is asked of another as well, which costs tokens.</source>
            <translation>临近结束时，某台服务器处理较慢的行也会询问另一台，这会消耗 token。</translation>
        </message>
        <message>
            <source>Add a column that says who answered</source>
            <translation>添加一列注明由谁回答</translation>
        </message>
        <message>
            <source>A Ray cluster at</source>
            <translation>Ray 集群，地址</translation>
        </message>
        <message>
            <source>Each of its nodes answers rows with the model that is loaded here.</source>
            <translation>其每个节点都用这里加载的模型回答各行。</translation>
        </message>
        <message>
            <source>Address of the Ray cluster</source>
            <translation>Ray 集群的地址</translation>
        </message>
        <message>
            <source>auto, or 10.0.0.5:6379</source>
            <translation>auto 或 10.0.0.5:6379</translation>
        </message>
        <message>
            <source>This PC</source>
            <translation>这台电脑</translation>
        </message>
        <message>
            <source>Give the address of the Ray cluster, or auto for the one of this PC.</source>
            <translation>请输入 Ray 集群的地址；这台电脑的集群请输入 auto。</translation>
        </message>
        <message>
            <source>Choose who answers the rows.</source>
            <translation>请选择由谁回答各行。</translation>
        </message>
    </context>
    <context>
        <name>PlanBars</name>
        <message>
            <source>experts, {0} slots</source>
            <translation>专家，{0} 个槽位</translation>
        </message>
        <message>
            <source>experts</source>
            <translation>专家</translation>
        </message>
        <message>
            <source>model</source>
            <translation>模型</translation>
        </message>
        <message>
            <source>loading buffers</source>
            <translation>加载缓冲</translation>
        </message>
        <message>
            <source>chat memory</source>
            <translation>对话内存</translation>
        </message>
        <message>
            <source>working memory</source>
            <translation>工作内存</translation>
        </message>
        <message>
            <source>reading pictures</source>
            <translation>读取图片</translation>
        </message>
        <message>
            <source>safety margin</source>
            <translation>安全余量</translation>
        </message>
        <message>
            <source>other programs</source>
            <translation>其他程序</translation>
        </message>
        <message>
            <source>Memory by tier</source>
            <translation>各级内存</translation>
        </message>
        <message>
            <source>under {0}</source>
            <translation>不足 {0}</translation>
        </message>
        <message>
            <source>free</source>
            <translation>空闲</translation>
        </message>
        <message>
            <source>{0} GB</source>
            <translation>{0} GB</translation>
        </message>
        <message>
            <source>{0} of {1} GB</source>
            <translation>{0} / {1} GB</translation>
        </message>
    </context>
    <context>
        <name>PlanCard</name>
        <message>
            <source>Plan</source>
            <translation>方案</translation>
        </message>
        <message>
            <source>Planning…</source>
            <translation>正在规划…</translation>
        </message>
        <message>
            <source>{0} {1}: {2}</source>
            <translation>{0} {1}：{2}</translation>
        </message>
        <message>
            <source>Alternatives, in tokens/s: {0}.</source>
            <translation>其他选择（token/秒）：{0}。</translation>
        </message>
        <message>
            <source>Plan for {0}</source>
            <translation>{0} 的方案</translation>
        </message>
    </context>
    <context>
        <name>PlanTable</name>
        <message>
            <source>Plan</source>
            <translation>方案</translation>
        </message>
        <message>
            <source>Predicted</source>
            <translation>预测</translation>
        </message>
        <message>
            <source>Timed</source>
            <translation>实测</translation>
        </message>
        <message>
            <source>Tokens/s</source>
            <translation>token/秒</translation>
        </message>
        <message>
            <source>predicted {0} tokens/s ({1} to {2})</source>
            <translation>预测 {0} token/秒（{1} 至 {2}）</translation>
        </message>
        <message>
            <source>timed {0} tokens/s</source>
            <translation>实测 {0} token/秒</translation>
        </message>
        <message>
            <source>{2} runs from {0} to {1}</source>
            <translation>{2} 次，{0} 至 {1}</translation>
        </message>
        <message>
            <source>first token after {0} s</source>
            <translation>首个 token {0} 秒</translation>
        </message>
        <message>
            <source>winner</source>
            <translation>最快</translation>
        </message>
        <message>
            <source>the plan</source>
            <translation>方案</translation>
        </message>
        <message>
            <source>as it ran before</source>
            <translation>原有设置</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>失败</translation>
        </message>
    </context>
    <context>
        <name>PoliciesCard</name>
        <message>
            <source>Policies</source>
            <translation>策略</translation>
        </message>
        <message>
            <source>Cache policies</source>
            <translation>缓存策略</translation>
        </message>
        <message>
            <source>When the cache is full, a policy decides which expert to evict for the next one. Each is tested on the model's actual requests; its share of hits (experts found in the cache) shows how well it would do.</source>
            <translation>缓存已满时，由策略决定淘汰哪个专家来腾出位置。每种策略都用模型的实际请求测试；命中（在缓存中找到专家）的比例表明其效果。</translation>
        </message>
        <message>
            <source>recent hit rate, each on its own</source>
            <translation>近期命中率，各策略单独计算</translation>
        </message>
        <message>
            <source>All are simulated on the live routing; the one with the most hits is adopted.</source>
            <translation>所有策略都在实时路由上模拟；采用命中最多的策略。</translation>
        </message>
        <message>
            <source>The policy is set in the settings; the others are simulated.</source>
            <translation>策略已在设置中指定；其他策略仅作模拟。</translation>
        </message>
        <message>
            <source>{0}%</source>
            <translation>{0}%</translation>
        </message>
        <message>
            <source>{0} in use</source>
            <translation>正在使用 {0}</translation>
        </message>
    </context>
    <context>
        <name>PredictButton</name>
        <message>
            <source>Predicted</source>
            <translation>预测</translation>
        </message>
        <message>
            <source>The simulator's prediction for this request, below the recording</source>
            <translation>模拟器对此请求的预测，显示在录制内容下方</translation>
        </message>
        <message>
            <source>Show the predicted timeline</source>
            <translation>显示预测时间线</translation>
        </message>
        <message>
            <source>Nothing to predict yet: ask something in Chat first.</source>
            <translation>还没有可预测的内容：请先在“对话”中提问。</translation>
        </message>
        <message>
            <source>the model's files could not be read</source>
            <translation>无法读取模型的文件</translation>
        </message>
        <message>
            <source>No prediction: {0}</source>
            <translation>无法预测：{0}</translation>
        </message>
    </context>
    <context>
        <name>Predicted</name>
        <message>
            <source>{0} tokens/s predicted</source>
            <translation>预测 {0} token/秒</translation>
        </message>
        <message>
            <source>{0} measured</source>
            <translation>实测 {0}</translation>
        </message>
        <message>
            <source>first token after {0}</source>
            <translation>首个 token {0} 后</translation>
        </message>
        <message>
            <source>Simulated for {0} tokens read and {1} written, aligned at the same step.</source>
            <translation>按读取 {0} 个、生成 {1} 个 token 模拟，在同一步对齐。</translation>
        </message>
        <message>
            <source>Measured here: {0}.</source>
            <translation>本机测得：{0}。</translation>
        </message>
        <message>
            <source>From data sheets, not measured by Tune: {0}.</source>
            <translation>来自规格，未经调优测量：{0}。</translation>
        </message>
        <message>
            <source>Assumed: typical expert popularity, so that {0} slots hit {1}%;</source>
            <translation>假设：专家热度分布典型，{0} 个槽位命中 {1}%；</translation>
        </message>
        <message>
            <source>Assumed: typical expert popularity;</source>
            <translation>假设：专家热度分布典型；</translation>
        </message>
        <message>
            <source>no other program is running.</source>
            <translation>没有其他程序在运行。</translation>
        </message>
        <message>
            <source>processor and RAM</source>
            <translation>处理器和内存</translation>
        </message>
        <message>
            <source>graphics card</source>
            <translation>显卡</translation>
        </message>
        <message>
            <source>PCIe</source>
            <translation>PCIe</translation>
        </message>
        <message>
            <source>disk</source>
            <translation>磁盘</translation>
        </message>
    </context>
    <context>
        <name>PredictionCard</name>
        <message>
            <source>Prefetching</source>
            <translation>预取</translation>
        </message>
        <message>
            <source>Prefetching copies experts before they are needed, guessing which will be. A right guess saves a miss, a wait for memory; a wrong one costs a useless copy.</source>
            <translation>预取会猜测接下来需要哪些专家，并提前复制。猜对可避免一次未命中，即一次内存等待；猜错则浪费一次复制。</translation>
        </message>
        <message>
            <source>In use: {0}, one layer ahead.</source>
            <translation>正在使用：{0}，提前一层。</translation>
        </message>
        <message numerus="yes">
            <source>In use: {0}, {1} layers ahead.</source>
            <translation>
                <numerusform>正在使用：{0}，提前 {1} 层。</numerusform>
            </translation>
        </message>
        <message>
            <source>None is in use: no predictor would save more than it costs.</source>
            <translation>未使用：没有哪个预测器节省的多于其代价。</translation>
        </message>
        <message>
            <source>Nothing is predicted on this model and machine: experts are fetched on a miss.</source>
            <translation>在此模型和机器上不做预测：未命中时才取入专家。</translation>
        </message>
        <message>
            <source>Predictor</source>
            <translation>预测器</translation>
        </message>
        <message>
            <source>predicted</source>
            <translation>预测</translation>
        </message>
        <message>
            <source>right</source>
            <translation>猜对</translation>
        </message>
        <message>
            <source>gain</source>
            <translation>收益</translation>
        </message>
        <message>
            <source>{0} ms</source>
            <translation>{0} ms</translation>
        </message>
        <message>
            <source>Share of the missing experts that was predicted</source>
            <translation>缺失的专家中被预测到的比例</translation>
        </message>
        <message>
            <source>Share of the predicted, missing experts that was needed</source>
            <translation>预测的缺失专家中确实需要的比例</translation>
        </message>
        <message>
            <source>Milliseconds its use would save per step, net of its cost</source>
            <translation>扣除其代价后，每步可节省的毫秒数</translation>
        </message>
        <message>
            <source>used</source>
            <translation>已用</translation>
        </message>
        <message>
            <source>wasted</source>
            <translation>浪费</translation>
        </message>
        <message>
            <source>{0}: of {1} prefetched, {2} used, {3} wasted (hatched), the rest waits.</source>
            <translation>{0}：预取 {1} 个，已用 {2}，浪费 {3}（斜线），其余等待中。</translation>
        </message>
        <message>
            <source>{0}%</source>
            <translation>{0}%</translation>
        </message>
    </context>
    <context>
        <name>ProgressCard</name>
        <message>
            <source>Job progress</source>
            <translation>任务进度</translation>
        </message>
    </context>
    <context>
        <name>PromptPopover</name>
        <message>
            <source>Saved prompts</source>
            <translation>已保存的提示词</translation>
        </message>
        <message>
            <source>Find a prompt</source>
            <translation>查找提示词</translation>
        </message>
        <message>
            <source>/</source>
            <translation>/</translation>
        </message>
        <message>
            <source>Saved prompts, in an empty message</source>
            <translation>已保存的提示词（在空消息中）</translation>
        </message>
        <message>
            <source>Save this message…</source>
            <translation>保存此消息…</translation>
        </message>
        <message>
            <source>New…</source>
            <translation>新建…</translation>
        </message>
        <message>
            <source>Edit…</source>
            <translation>编辑…</translation>
        </message>
        <message>
            <source>Delete</source>
            <translation>删除</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>撤销</translation>
        </message>
        <message>
            <source>No saved prompt has these words.</source>
            <translation>没有包含这些词的已保存提示词。</translation>
        </message>
        <message>
            <source>Nothing is saved yet. A saved prompt is a message to use again; where it says {{topic}}, you are asked for the topic each time.</source>
            <translation>还没有保存任何内容。已保存的提示词是可重复使用的消息；其中写有 {{topic}} 的地方，每次都会询问具体内容。</translation>
        </message>
        <message>
            <source>Insert</source>
            <translation>插入</translation>
        </message>
        <message>
            <source>Back</source>
            <translation>返回</translation>
        </message>
        <message>
            <source>Name of the prompt</source>
            <translation>提示词的名称</translation>
        </message>
        <message>
            <source>Name</source>
            <translation>名称</translation>
        </message>
        <message>
            <source>Prompt</source>
            <translation>提示词</translation>
        </message>
        <message>
            <source>Summarise {{text}} in {{number}} sentences.</source>
            <translation>用 {{number}} 句话总结 {{text}}。</translation>
        </message>
        <message>
            <source>A name between double braces, such as {{topic}}, is asked for each time.</source>
            <translation>双花括号中的名称（例如 {{topic}}）每次都会询问。</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>保存</translation>
        </message>
        <message>
            <source>Another prompt has this name: saving replaces it.</source>
            <translation>已有同名的提示词：保存会将其替换。</translation>
        </message>
    </context>
    <context>
        <name>QuickPrompt</name>
        <message>
            <source>Quick question</source>
            <translation>快速提问</translation>
        </message>
        <message>
            <source>Ask something</source>
            <translation>提个问题</translation>
        </message>
        <message>
            <source>Question</source>
            <translation>问题</translation>
        </message>
        <message>
            <source>Enter asks, Shift+Enter starts a new line, Esc closes</source>
            <translation>Enter 提问，Shift+Enter 换行，Esc 关闭</translation>
        </message>
        <message>
            <source>Answer</source>
            <translation>回答</translation>
        </message>
        <message>
            <source>Open in Switchyard</source>
            <translation>在 Switchyard 中打开</translation>
        </message>
        <message>
            <source>The server that answers new chats is not in the list: choose another model.</source>
            <translation>回答新对话的服务器不在列表中：请选择其他模型。</translation>
        </message>
        <message>
            <source>This would go to {0}: send a chat there from Switchyard first.</source>
            <translation>这将发送到 {0}：请先从 Switchyard 向那里发送一次对话。</translation>
        </message>
        <message>
            <source>Waiting for the answer…</source>
            <translation>正在等待回答…</translation>
        </message>
        <message>
            <source>Thinking…</source>
            <translation>思考中…</translation>
        </message>
        <message>
            <source>The engine is not running: open Switchyard to restart it.</source>
            <translation>引擎未运行：请打开 Switchyard 重启引擎。</translation>
        </message>
        <message>
            <source>No model is loaded: open Switchyard to choose one.</source>
            <translation>未加载模型：请打开 Switchyard 选择模型。</translation>
        </message>
        <message>
            <source>The model is loading; the answer follows.</source>
            <translation>正在加载模型；回答随后出现。</translation>
        </message>
        <message>
            <source>Waiting for another answer…</source>
            <translation>正在等待另一个回答…</translation>
        </message>
        <message>
            <source>Stop</source>
            <translation>停止</translation>
        </message>
        <message>
            <source>Ask</source>
            <translation>提问</translation>
        </message>
    </context>
    <context>
        <name>RaceCard</name>
        <message>
            <source>Timed on the real engine</source>
            <translation>在真实引擎上测速</translation>
        </message>
        <message>
            <source>Nothing timed yet: “Tune” times the best plans and the current settings with real tokens.</source>
            <translation>尚未测速：“调优”会用真实 token 测试最佳方案和当前设置。</translation>
        </message>
        <message>
            <source>Use winner now</source>
            <translation>立即使用最快的</translation>
        </message>
        <message>
            <source>Keep as before</source>
            <translation>保持原样</translation>
        </message>
        <message>
            <source>Bars: measured, which is what counts. Brackets: the predicted range.</source>
            <translation>条形：实测值，以此为准。括号：预测范围。</translation>
        </message>
        <message>
            <source>{0}, {1}</source>
            <translation>{0}，{1}</translation>
        </message>
        <message>
            <source>Before {0} → after {1} tokens/s</source>
            <translation>之前 {0} → 之后 {1} token/秒</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} token/秒</translation>
        </message>
        <message>
            <source>This model now runs with it: {0}, {1} tokens/s.</source>
            <translation>此模型现在按此运行：{0}，{1} token/秒。</translation>
        </message>
        <message>
            <source>This model has since run at {0} tokens/s, much faster than the {1} timed here: the machine was busy then. Plans no longer use these figures. Tune again.</source>
            <translation>此模型此后以 {0} token/秒运行，远快于这里测得的 {1}：当时机器正忙。方案不再使用这些数字。请重新调优。</translation>
        </message>
        <message>
            <source>Other programs used {0}% of the CPU while this was timed: every figure is too low, and the wrong plan may have won. Plans do not use these figures. Tune again when those programs have finished.</source>
            <translation>测速时其他程序占用了 {0}% 的 CPU：所有数字都偏低，可能选错了方案。方案不使用这些数字。请等这些程序结束后重新调优。</translation>
        </message>
    </context>
    <context>
        <name>RaceDelegate</name>
        <message>
            <source>waits</source>
            <translation>等待中</translation>
        </message>
    </context>
    <context>
        <name>RaceView</name>
        <message>
            <source>Plans, predicted and measured</source>
            <translation>方案，预测与实测</translation>
        </message>
    </context>
    <context>
        <name>RangeBar</name>
        <message>
            <source>10 s</source>
            <translation>10 秒</translation>
        </message>
        <message>
            <source>Show 10 seconds</source>
            <translation>显示 10 秒</translation>
        </message>
        <message>
            <source>60 s</source>
            <translation>60 秒</translation>
        </message>
        <message>
            <source>Show 60 seconds</source>
            <translation>显示 60 秒</translation>
        </message>
        <message>
            <source>5 min</source>
            <translation>5 分钟</translation>
        </message>
        <message>
            <source>Show 5 minutes</source>
            <translation>显示 5 分钟</translation>
        </message>
        <message>
            <source>Session</source>
            <translation>会话</translation>
        </message>
        <message>
            <source>Show the whole session</source>
            <translation>显示整个会话</translation>
        </message>
        <message>
            <source>Freeze</source>
            <translation>冻结</translation>
        </message>
        <message>
            <source>Frozen</source>
            <translation>已冻结</translation>
        </message>
        <message>
            <source>Space freezes</source>
            <translation>空格键冻结</translation>
        </message>
        <message>
            <source>Frozen: Home follows</source>
            <translation>已冻结：Home 键跟随</translation>
        </message>
        <message>
            <source>Space freezes the view; recording continues</source>
            <translation>空格键冻结视图；录制继续</translation>
        </message>
        <message>
            <source>Home follows live data</source>
            <translation>Home 键跟随实时数据</translation>
        </message>
        <message>
            <source>Freeze the view; recording continues</source>
            <translation>冻结视图；录制继续</translation>
        </message>
        <message>
            <source>Follow live data</source>
            <translation>跟随实时数据</translation>
        </message>
    </context>
    <context>
        <name>RecommendationList</name>
        <message>
            <source>≈ Size from the catalogue, not checked with the hub.</source>
            <translation>≈ 目录中的大小，未向 Hub 核实。</translation>
        </message>
    </context>
    <context>
        <name>RecommendationRow</name>
        <message>
            <source>Download</source>
            <translation>下载</translation>
        </message>
    </context>
    <context>
        <name>Recommendations</name>
        <message>
            <source>Fast</source>
            <translation>快速</translation>
        </message>
        <message>
            <source>Balanced</source>
            <translation>平衡</translation>
        </message>
        <message>
            <source>Best that fits</source>
            <translation>放得下的最佳</translation>
        </message>
        <message>
            <source>on this PC</source>
            <translation>在这台电脑上</translation>
        </message>
        <message>
            <source>first answer in about {0}</source>
            <translation>约 {0} 后得到首个回答</translation>
        </message>
        <message>
            <source>first answer in about {0} at 100 Mbit/s</source>
            <translation>按 100 Mbit/s 约 {0} 后得到首个回答</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>下载</translation>
        </message>
        <message>
            <source>Downloading</source>
            <translation>正在下载</translation>
        </message>
        <message>
            <source>Load</source>
            <translation>加载</translation>
        </message>
    </context>
    <context>
        <name>Report</name>
        <message>
            <source>Save a report</source>
            <translation>保存报告</translation>
        </message>
        <message>
            <source>Text (*.txt)</source>
            <translation>文本 (*.txt)</translation>
        </message>
    </context>
    <context>
        <name>Resizing</name>
        <message>
            <source>Requested {0} experts…</source>
            <translation>已请求 {0} 个专家…</translation>
        </message>
        <message>
            <source>Stays at {0} experts: no room for {1}.</source>
            <translation>仍为 {0} 个专家：没有空间容纳 {1} 个。</translation>
        </message>
        <message>
            <source>Stays at {0} experts: {1} is not a valid size, or too few for a step.</source>
            <translation>仍为 {0} 个专家：{1} 不是有效的大小，或不足以完成一步。</translation>
        </message>
        <message>
            <source>Now {0} experts, was {1}; no room for {2}.</source>
            <translation>现为 {0} 个专家，原为 {1} 个；没有空间容纳 {2} 个。</translation>
        </message>
        <message>
            <source>Now {0} experts, was {1}.</source>
            <translation>现为 {0} 个专家，原为 {1} 个。</translation>
        </message>
        <message>
            <source>hits {0}%, was {1}%</source>
            <translation>命中 {0}%，原为 {1}%</translation>
        </message>
        <message>
            <source>{0} tokens/s, was {1}</source>
            <translation>{0} token/秒，原为 {1}</translation>
        </message>
        <message>
            <source>(predicted: {0})</source>
            <translation>（预测：{0}）</translation>
        </message>
        <message>
            <source>Measured: {0}.</source>
            <translation>实测：{0}。</translation>
        </message>
    </context>
    <context>
        <name>RooflinePlot</name>
        <message>
            <source>operations per byte →</source>
            <translation>每字节运算次数 →</translation>
        </message>
        <message>
            <source>Roofline</source>
            <translation>屋顶线模型</translation>
        </message>
        <message>
            <source>{0}: {1}, up to {2}</source>
            <translation>{0}：{1}，最高 {2}</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>GPU over the link</source>
            <translation>经连接的 GPU</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>limited by the link to the card</source>
            <translation>受限于与显卡的连接</translation>
        </message>
        <message>
            <source>limited by the card's memory</source>
            <translation>受限于显存</translation>
        </message>
        <message>
            <source>limited by GPU compute</source>
            <translation>受限于 GPU 算力</translation>
        </message>
        <message>
            <source>limited by RAM</source>
            <translation>受限于内存</translation>
        </message>
        <message>
            <source>limited by CPU compute</source>
            <translation>受限于 CPU 算力</translation>
        </message>
        <message>
            <source>{0}: {1} operations per byte, {2}, {3}</source>
            <translation>{0}：每字节 {1} 次运算，{2}，{3}</translation>
        </message>
        <message>
            <source>decode</source>
            <translation>解码</translation>
        </message>
        <message>
            <source>prefill</source>
            <translation>预填充</translation>
        </message>
        <message>
            <source>batch</source>
            <translation>批处理</translation>
        </message>
    </context>
    <context>
        <name>RowDetail</name>
        <message>
            <source>Prompt</source>
            <translation>提示词</translation>
        </message>
        <message>
            <source>Reasoning</source>
            <translation>推理过程</translation>
        </message>
        <message>
            <source>Answer</source>
            <translation>回答</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>复制</translation>
        </message>
        <message>
            <source>Copy the answer</source>
            <translation>复制回答</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>关闭</translation>
        </message>
        <message>
            <source>Row {0}</source>
            <translation>第 {0} 行</translation>
        </message>
        <message>
            <source>{0} tokens</source>
            <translation>{0} 个 token</translation>
        </message>
        <message>
            <source>Failed: the row {0}.</source>
            <translation>失败。该行：{0}。</translation>
        </message>
        <message>
            <source>The input can no longer be read, or the row was not sent.</source>
            <translation>输入已无法读取，或该行未发送。</translation>
        </message>
    </context>
    <context>
        <name>RowsCard</name>
        <message>
            <source>Finished rows</source>
            <translation>已完成的行</translation>
        </message>
        <message>
            <source>Row</source>
            <translation>行</translation>
        </message>
        <message>
            <source>Prompt</source>
            <translation>提示词</translation>
        </message>
        <message>
            <source>Answer</source>
            <translation>回答</translation>
        </message>
        <message>
            <source>End</source>
            <translation>结束</translation>
        </message>
        <message>
            <source>Tokens</source>
            <translation>Token</translation>
        </message>
        <message>
            <source>Answer again with more tokens</source>
            <translation>增加 token 后重新回答</translation>
        </message>
        <message>
            <source>Twice as many as each of them had</source>
            <translation>为原有数量的两倍</translation>
        </message>
        <message>
            <source>Latest</source>
            <translation>最新</translation>
        </message>
        <message>
            <source>All</source>
            <translation>全部</translation>
        </message>
        <message>
            <source>Failed</source>
            <translation>失败</translation>
        </message>
        <message>
            <source>Cut off</source>
            <translation>被截断</translation>
        </message>
        <message>
            <source>No row has failed.</source>
            <translation>没有失败的行。</translation>
        </message>
        <message>
            <source>No row was cut off at its limit of tokens.</source>
            <translation>没有因 token 上限而被截断的行。</translation>
        </message>
        <message>
            <source>Rows appear here as they are answered.</source>
            <translation>回答的行会显示在这里。</translation>
        </message>
        <message>
            <source>No row has been answered yet.</source>
            <translation>还没有回答任何行。</translation>
        </message>
    </context>
    <context>
        <name>RunCard</name>
        <message>
            <source>Tuning</source>
            <translation>调优</translation>
        </message>
        <message>
            <source>A model, by a few letters of its name</source>
            <translation>输入模型名称的几个字母</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>模型</translation>
        </message>
        <message>
            <source>A model on this PC, one of the catalogue, or a hub id such as Qwen/Qwen3-30B-A3B</source>
            <translation>这台电脑上的模型、目录中的模型，或 Hub 标识，例如 Qwen/Qwen3-30B-A3B</translation>
        </message>
        <message>
            <source>Quick, 10 s</source>
            <translation>快速，10 秒</translation>
        </message>
        <message>
            <source>Quick: measures for about ten seconds</source>
            <translation>快速：测量约十秒</translation>
        </message>
        <message>
            <source>Thorough, 2 min</source>
            <translation>详细，2 分钟</translation>
        </message>
        <message>
            <source>Thorough: measures for about two minutes</source>
            <translation>详细：测量约两分钟</translation>
        </message>
        <message>
            <source>Measure only</source>
            <translation>仅测量</translation>
        </message>
        <message>
            <source>Tune</source>
            <translation>调优</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>取消</translation>
        </message>
        <message>
            <source>Progress</source>
            <translation>进度</translation>
        </message>
        <message>
            <source>Save anyway</source>
            <translation>仍然保存</translation>
        </message>
        <message>
            <source>Saves figures that are too low because other programs were busy</source>
            <translation>保存因其他程序繁忙而偏低的数字</translation>
        </message>
        <message>
            <source>Cancelling</source>
            <translation>正在取消</translation>
        </message>
        <message>
            <source>Cancelling. The previous model is loaded again.</source>
            <translation>正在取消。正在重新加载原来的模型。</translation>
        </message>
        <message>
            <source>Tune again</source>
            <translation>重新调优</translation>
        </message>
        <message>
            <source>Only models on this PC can be timed; of this one you see a plan.</source>
            <translation>只有这台电脑上的模型才能测速；此模型仅显示方案。</translation>
        </message>
        <message>
            <source>Get it on the Models page…</source>
            <translation>在“模型”页获取…</translation>
        </message>
        <message>
            <source>Get another model…</source>
            <translation>获取其他模型…</translation>
        </message>
    </context>
    <context>
        <name>RunFollowing</name>
        <message>
            <source>Waiting for the answer</source>
            <translation>正在等待回答</translation>
        </message>
        <message>
            <source>Waiting for the engine</source>
            <translation>正在等待引擎</translation>
        </message>
        <message>
            <source>being timed</source>
            <translation>测速中</translation>
        </message>
        <message>
            <source>being loaded</source>
            <translation>加载中</translation>
        </message>
        <message>
            <source>Cancelled: nothing was saved or changed.</source>
            <translation>已取消：没有保存或更改任何内容。</translation>
        </message>
        <message>
            <source>Not saved: other programs used {0}% of the CPU, so these figures are too low. Close them or let them finish, then tune again.</source>
            <translation>未保存：其他程序占用了 {0}% 的 CPU，这些数字偏低。请关闭它们或等其完成，然后重新调优。</translation>
        </message>
        <message>
            <source>Saved. Loading the model with it.</source>
            <translation>已保存。正在按此加载模型。</translation>
        </message>
    </context>
    <context>
        <name>RunningJobGuard</name>
        <message>
            <source>A batch job is running.</source>
            <translation>有一个批处理任务正在运行。</translation>
        </message>
        <message>
            <source>It stops with the window. No answered row is lost: you can resume it at the next start.</source>
            <translation>它会随窗口停止。已回答的行不会丢失：下次启动时可以继续。</translation>
        </message>
        <message>
            <source>Stop it and close</source>
            <translation>停止并关闭</translation>
        </message>
        <message numerus="yes">
            <source>{0} batch jobs are running.</source>
            <translation>
                <numerusform>有 {0} 个批处理任务正在运行。</numerusform>
            </translation>
        </message>
        <message>
            <source>They stop with the window. No answered row is lost: you can resume them at the next start.</source>
            <translation>它们会随窗口停止。已回答的行不会丢失：下次启动时可以继续。</translation>
        </message>
        <message>
            <source>Stop them and close</source>
            <translation>停止并关闭</translation>
        </message>
        <message>
            <source>Keep the window open</source>
            <translation>保持窗口打开</translation>
        </message>
    </context>
    <context>
        <name>SampleCard</name>
        <message>
            <source>Try the first rows</source>
            <translation>先试最初几行</translation>
        </message>
        <message>
            <source>See the answers, and how fast they come, before you start the job.</source>
            <translation>在开始任务之前查看回答及其速度。</translation>
        </message>
        <message>
            <source>Answering…</source>
            <translation>正在回答…</translation>
        </message>
        <message>
            <source>Stopped.</source>
            <translation>已停止。</translation>
        </message>
        <message>
            <source>Answer one row</source>
            <translation>回答一行</translation>
        </message>
        <message>
            <source>Answer two rows</source>
            <translation>回答两行</translation>
        </message>
        <message>
            <source>Stop</source>
            <translation>停止</translation>
        </message>
        <message>
            <source>Answer three rows</source>
            <translation>回答三行</translation>
        </message>
    </context>
    <context>
        <name>SamplingPopover</name>
        <message>
            <source>Sampling</source>
            <translation>采样</translation>
        </message>
        <message>
            <source>Recommended</source>
            <translation>推荐</translation>
        </message>
        <message>
            <source>Save as…</source>
            <translation>另存为…</translation>
        </message>
        <message>
            <source>Rename…</source>
            <translation>重命名…</translation>
        </message>
        <message>
            <source>Delete</source>
            <translation>删除</translation>
        </message>
        <message>
            <source>Name of the preset</source>
            <translation>预设名称</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>保存</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>取消</translation>
        </message>
        <message>
            <source>New chats begin with this</source>
            <translation>新对话以此开始</translation>
        </message>
        <message>
            <source>Use for new chats</source>
            <translation>用于新对话</translation>
        </message>
        <message>
            <source>The model suggests nothing: {0}</source>
            <translation>模型没有给出建议：{0}</translation>
        </message>
        <message>
            <source>As the model's makers suggest: {0}</source>
            <translation>模型作者的建议：{0}</translation>
        </message>
        <message>
            <source>{0}: {1}.</source>
            <translation>{0}：{1}。</translation>
        </message>
        <message>
            <source>Recommended: {0}.</source>
            <translation>推荐：{0}。</translation>
        </message>
    </context>
    <context>
        <name>SearchCard</name>
        <message>
            <source>Get a model</source>
            <translation>获取模型</translation>
        </message>
        <message>
            <source>Runs well here</source>
            <translation>在本机运行良好</translation>
        </message>
        <message>
            <source>Apache or MIT licence</source>
            <translation>Apache 或 MIT 许可证</translation>
        </message>
        <message>
            <source>Size</source>
            <translation>大小</translation>
        </message>
        <message>
            <source>Any size</source>
            <translation>任意大小</translation>
        </message>
        <message>
            <source>Up to {0} GB</source>
            <translation>不超过 {0} GB</translation>
        </message>
        <message>
            <source>Good at</source>
            <translation>擅长</translation>
        </message>
        <message>
            <source>Good at anything</source>
            <translation>不限用途</translation>
        </message>
        <message>
            <source>Open its page</source>
            <translation>打开其页面</translation>
        </message>
        <message>
            <source>Access token…</source>
            <translation>访问令牌…</translation>
        </message>
        <message>
            <source>Looking at this machine…</source>
            <translation>正在检查本机…</translation>
        </message>
        <message>
            <source>Nothing in the catalogue matches: press Enter to search the hub, or remove a filter.</source>
            <translation>目录中没有符合条件的模型：按 Enter 搜索 Hub，或减少筛选条件。</translation>
        </message>
        <message>
            <source>The hub has nothing for “{0}”: try fewer words.</source>
            <translation>Hub 上没有与“{0}”相符的内容：请减少关键词。</translation>
        </message>
        <message>
            <source>its makers ask you to accept their terms first</source>
            <translation>其作者要求先接受条款</translation>
        </message>
        <message>
            <source>Licence: {0}</source>
            <translation>许可证：{0}</translation>
        </message>
        <message>
            <source>Searching…</source>
            <translation>正在搜索…</translation>
        </message>
    </context>
    <context>
        <name>SearchLine</name>
        <message>
            <source>Name or words</source>
            <translation>名称或关键词</translation>
        </message>
        <message>
            <source>Filters the catalogue; Enter searches the hub, also for ORG/NAME or a link</source>
            <translation>筛选目录；按 Enter 搜索 Hub，也可输入 ORG/NAME 或链接</translation>
        </message>
        <message>
            <source>Search for a model</source>
            <translation>搜索模型</translation>
        </message>
        <message>
            <source>Search</source>
            <translation>搜索</translation>
        </message>
    </context>
    <context>
        <name>SecondTimeline</name>
        <message>
            <source>Second timeline</source>
            <translation>第二条时间线</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>关闭</translation>
        </message>
        <message>
            <source>Predicted</source>
            <translation>预测</translation>
        </message>
    </context>
    <context>
        <name>ServedRequests</name>
        <message>
            <source>Time</source>
            <translation>时间</translation>
        </message>
        <message>
            <source>Program</source>
            <translation>程序</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>模型</translation>
        </message>
        <message>
            <source>Read</source>
            <translation>读取</translation>
        </message>
        <message>
            <source>Written</source>
            <translation>生成</translation>
        </message>
        <message>
            <source>Seconds</source>
            <translation>秒</translation>
        </message>
        <message>
            <source>Outcome</source>
            <translation>结果</translation>
        </message>
        <message>
            <source>answered</source>
            <translation>已回答</translation>
        </message>
        <message>
            <source>client left</source>
            <translation>客户端已断开</translation>
        </message>
        <message>
            <source>wrong key</source>
            <translation>密钥错误</translation>
        </message>
        <message>
            <source>refused ({0})</source>
            <translation>已拒绝（{0}）</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>失败</translation>
        </message>
        <message>
            <source>{0}, {1}: {2}; {3} tokens read, {4} written, {5} s</source>
            <translation>{0}，{1}：{2}；读取 {3} 个 token，生成 {4} 个，{5} 秒</translation>
        </message>
    </context>
    <context>
        <name>ServerDialog</name>
        <message>
            <source>Save</source>
            <translation>保存</translation>
        </message>
        <message>
            <source>Test</source>
            <translation>测试</translation>
        </message>
        <message>
            <source>Add a server</source>
            <translation>添加服务器</translation>
        </message>
        <message>
            <source>Address</source>
            <translation>地址</translation>
        </message>
        <message>
            <source>Name</source>
            <translation>名称</translation>
        </message>
        <message>
            <source>same as its host</source>
            <translation>与主机名相同</translation>
        </message>
        <message>
            <source>none</source>
            <translation>无</translation>
        </message>
        <message>
            <source>as it is kept</source>
            <translation>保持已存的</translation>
        </message>
        <message>
            <source>Key</source>
            <translation>密钥</translation>
        </message>
        <message>
            <source>Certificate</source>
            <translation>证书</translation>
        </message>
        <message>
            <source>those that the system trusts</source>
            <translation>系统信任的证书</translation>
        </message>
        <message>
            <source>Choose…</source>
            <translation>选择…</translation>
        </message>
        <message>
            <source>Choose a certificate's file</source>
            <translation>选择证书文件</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>模型</translation>
        </message>
        <message>
            <source>Requests at once</source>
            <translation>同时请求数</translation>
        </message>
        <message>
            <source>as measured</source>
            <translation>按测量结果</translation>
        </message>
        <message>
            <source>Requests a minute</source>
            <translation>每分钟请求数</translation>
        </message>
        <message>
            <source>no limit</source>
            <translation>不限</translation>
        </message>
        <message>
            <source>Tokens a minute</source>
            <translation>每分钟 token 数</translation>
        </message>
        <message>
            <source>Price of a million tokens read</source>
            <translation>每百万读取 token 的价格</translation>
        </message>
        <message>
            <source>Price of a million tokens written</source>
            <translation>每百万生成 token 的价格</translation>
        </message>
        <message>
            <source>Currency</source>
            <translation>货币</translation>
        </message>
        <message>
            <source>Trust its certificate…</source>
            <translation>信任其证书…</translation>
        </message>
        <message>
            <source>Per million tokens read</source>
            <translation>每百万读取 token</translation>
        </message>
        <message>
            <source>Per million tokens written</source>
            <translation>每百万生成 token</translation>
        </message>
        <message>
            <source>price not known</source>
            <translation>价格未知</translation>
        </message>
        <message>
            <source>Chosen in each chat</source>
            <translation>在各对话中选择</translation>
        </message>
        <message>
            <source>Less</source>
            <translation>收起</translation>
        </message>
        <message>
            <source>More: certificate, model, limits and prices</source>
            <translation>更多：证书、模型、限制和价格</translation>
        </message>
        <message>
            <source>It is tested before it is kept: that asks a model for a few tokens. The key is kept in the system's keyring, or for this run only where there is none.</source>
            <translation>保存前会先测试：为此会向模型请求少量 token。密钥保存在系统密钥环中；没有密钥环时仅限本次运行。</translation>
        </message>
        <message>
            <source>Asking {0}…</source>
            <translation>正在询问 {0}…</translation>
        </message>
        <message>
            <source>It answers in {0} ms.</source>
            <translation>响应时间 {0} ms。</translation>
        </message>
        <message>
            <source>It answers in {0} ms; the first token came after {1} s.</source>
            <translation>响应时间 {0} ms；首个 token 用时 {1} 秒。</translation>
        </message>
        <message>
            <source>Choose a model and test again to see what it can do.</source>
            <translation>选择模型后再次测试，即可了解其功能。</translation>
        </message>
        <message>
            <source>Its fingerprint (SHA-256) is
{0}
Compare it with what that server shows: “switchyard serve --https” prints it. Only this certificate is trusted for this server then.</source>
            <translation>其指纹 (SHA-256) 为
{0}
请与该服务器显示的指纹核对：“switchyard serve --https”会将其输出。此后对该服务器只信任此证书。</translation>
        </message>
        <message>
            <source>Trust the certificate of {0}?</source>
            <translation>要信任 {0} 的证书吗？</translation>
        </message>
        <message>
            <source>Trust it</source>
            <translation>信任</translation>
        </message>
        <message>
            <source>Certificates (*.pem *.crt *.cer)</source>
            <translation>证书 (*.pem *.crt *.cer)</translation>
        </message>
        <message>
            <source>The server's certificate</source>
            <translation>服务器的证书</translation>
        </message>
    </context>
    <context>
        <name>Servers</name>
        <message>
            <source>Not tested yet.</source>
            <translation>尚未测试。</translation>
        </message>
        <message>
            <source>A server with OpenAI's interface</source>
            <translation>使用 OpenAI 接口的服务器</translation>
        </message>
        <message>
            <source>no model</source>
            <translation>没有模型</translation>
        </message>
        <message>
            <source>{0} and {1} more</source>
            <translation>{0} 等另外 {1} 个</translation>
        </message>
        <message>
            <source>{0} or {1}</source>
            <translation>{0}或{1}</translation>
        </message>
        <message>
            <source>It cannot {0}.</source>
            <translation>不支持：{0}。</translation>
        </message>
        <message>
            <source>Models that read text only, no pictures: {0}.</source>
            <translation>只读取文本、不读取图片的模型：{0}。</translation>
        </message>
        <message>
            <source>It reads text only, no pictures.</source>
            <translation>只读取文本，不读取图片。</translation>
        </message>
        <message>
            <source>send answers as they are written</source>
            <translation>边生成边发送回答</translation>
        </message>
        <message>
            <source>count tokens</source>
            <translation>统计 token</translation>
        </message>
        <message>
            <source>call tools</source>
            <translation>调用工具</translation>
        </message>
        <message>
            <source>keep to a schema</source>
            <translation>遵循架构</translation>
        </message>
        <message>
            <source>take top-k, min-p or a repetition penalty</source>
            <translation>采用 top-k、min-p 或重复惩罚</translation>
        </message>
        <message>
            <source>{0} at once</source>
            <translation>同时 {0} 个</translation>
        </message>
        <message>
            <source>{0} requests a minute</source>
            <translation>每分钟 {0} 个请求</translation>
        </message>
        <message>
            <source>{0} tokens a minute</source>
            <translation>每分钟 {0} 个 token</translation>
        </message>
        <message>
            <source>a million tokens read: {0}{1}</source>
            <translation>每百万读取 token：{0}{1}</translation>
        </message>
        <message>
            <source>written: {0}{1}</source>
            <translation>生成：{0}{1}</translation>
        </message>
    </context>
    <context>
        <name>ServersCard</name>
        <message>
            <source>Remote servers</source>
            <translation>远程服务器</translation>
        </message>
        <message>
            <source>Add…</source>
            <translation>添加…</translation>
        </message>
        <message>
            <source>Add a server</source>
            <translation>添加服务器</translation>
        </message>
        <message>
            <source>vLLM, SGLang, llama.cpp, Ollama, another Switchyard. Text goes to one only in chats and jobs where you choose it.</source>
            <translation>vLLM、SGLang、llama.cpp、Ollama 或另一个 Switchyard。仅在您选择了该服务器的对话和任务中才会发送文本。</translation>
        </message>
        <message>
            <source>Look on this network</source>
            <translation>在此网络中查找</translation>
        </message>
        <message>
            <source>Models that run elsewhere</source>
            <translation>在别处运行的模型</translation>
        </message>
        <message>
            <source>Looking…</source>
            <translation>正在查找…</translation>
        </message>
        <message>
            <source>No Switchyard answered. One does if it was started with “switchyard serve --host 0.0.0.0 --https --announce NAME” in this network.</source>
            <translation>没有 Switchyard 响应。在此网络中以“switchyard serve --host 0.0.0.0 --https --announce NAME”启动的会响应。</translation>
        </message>
        <message>
            <source>All that answered are in the list.</source>
            <translation>所有响应的服务器都已在列表中。</translation>
        </message>
        <message>
            <source>Add {0}</source>
            <translation>添加 {0}</translation>
        </message>
        <message>
            <source>Found on this network · {0}</source>
            <translation>在此网络中找到 · {0}</translation>
        </message>
        <message>
            <source>Edit…</source>
            <translation>编辑…</translation>
        </message>
        <message>
            <source>Edit {0}</source>
            <translation>编辑 {0}</translation>
        </message>
        <message>
            <source>Remove</source>
            <translation>移除</translation>
        </message>
        <message>
            <source>Remove {0}</source>
            <translation>移除 {0}</translation>
        </message>
        <message>
            <source>Its key is removed, too. Chats that were held with it stay; nothing else answers in them by itself.</source>
            <translation>其密钥也会移除。与其进行的对话会保留；不会有其他模型自行在其中回答。</translation>
        </message>
        <message>
            <source>Remove {0}?</source>
            <translation>要移除 {0} 吗？</translation>
        </message>
    </context>
    <context>
        <name>SessionsButton</name>
        <message>
            <source>Sessions</source>
            <translation>会话</translation>
        </message>
        <message>
            <source>Reading…</source>
            <translation>正在读取…</translation>
        </message>
        <message>
            <source>None yet: ask something in Chat</source>
            <translation>暂无：请在“对话”中提问</translation>
        </message>
        <message>
            <source>Open</source>
            <translation>打开</translation>
        </message>
        <message>
            <source>Compare with</source>
            <translation>对比</translation>
        </message>
        <message>
            <source>The session could not be read.</source>
            <translation>无法读取该会话。</translation>
        </message>
    </context>
    <context>
        <name>Setting</name>
        <message>
            <source>Automatic</source>
            <translation>自动</translation>
        </message>
        <message>
            <source>Speed and memory</source>
            <translation>速度与内存</translation>
        </message>
        <message>
            <source>Runs on</source>
            <translation>运行位置</translation>
        </message>
        <message>
            <source>Automatic takes the graphics card, if there is one, and the processor for what does not fit.</source>
            <translation>“自动”会使用显卡（如果有），放不下的部分由处理器处理。</translation>
        </message>
        <message>
            <source>Processor only</source>
            <translation>仅处理器</translation>
        </message>
        <message>
            <source>Precision</source>
            <translation>精度</translation>
        </message>
        <message>
            <source>Automatic keeps the best that fits. Lower precision takes less memory and is faster.</source>
            <translation>“自动”采用放得下的最高精度。权重越粗略，占用内存越少，速度越快。</translation>
        </message>
        <message>
            <source>Graphics memory to use</source>
            <translation>可用显存</translation>
        </message>
        <message>
            <source>For experts that are used often; the rest is left to other programs.</source>
            <translation>用于常用的专家；其余留给其他程序。</translation>
        </message>
        <message>
            <source>RAM to use</source>
            <translation>可用内存</translation>
        </message>
        <message>
            <source>For the model; what does not fit is read from the disk again and again.</source>
            <translation>供模型使用；放不下的部分会反复从磁盘读取。</translation>
        </message>
        <message>
            <source>CPU threads</source>
            <translation>CPU 线程数</translation>
        </message>
        <message>
            <source>Automatic uses one per core. Fewer leave room for other programs.</source>
            <translation>“自动”每个核心使用一个。减少线程可为其他程序留出余地。</translation>
        </message>
        <message>
            <source>For experts</source>
            <translation>专家选项</translation>
        </message>
        <message>
            <source>Experts on each card</source>
            <translation>每张显卡上的专家</translation>
        </message>
        <message>
            <source>Automatic keeps as many as fit; 0 keeps none.</source>
            <translation>自动会保留尽可能多的专家；0 表示不保留。</translation>
        </message>
        <message>
            <source>Slots for each layer</source>
            <translation>每层的槽位</translation>
        </message>
        <message>
            <source>Automatic lets all layers share the slots; a number gives each layer that many of its own.</source>
            <translation>自动时所有层共享槽位；指定数字则每层独占相应数量。</translation>
        </message>
        <message>
            <source>Which experts stay on the card</source>
            <translation>保留在显卡上的专家</translation>
        </message>
        <message>
            <source>Automatic watches which rule would have kept the right ones, and takes that one.</source>
            <translation>“自动”会观察哪种规则本可保留正确的专家，并采用该规则。</translation>
        </message>
        <message>
            <source>Recently used ones</source>
            <translation>最近用过的</translation>
        </message>
        <message>
            <source>Newest ones</source>
            <translation>最新的</translation>
        </message>
        <message>
            <source>Often used ones</source>
            <translation>常用的</translation>
        </message>
        <message>
            <source>Recently and often used ones</source>
            <translation>最近且常用的</translation>
        </message>
        <message>
            <source>Random ones</source>
            <translation>随机的</translation>
        </message>
        <message>
            <source>Popular ones, fixed</source>
            <translation>热门的（固定）</translation>
        </message>
        <message>
            <source>Experts that are not on the card</source>
            <translation>不在显卡上的专家</translation>
        </message>
        <message>
            <source>All but the first are for comparisons.</source>
            <translation>除第一项外，其余用于比较。</translation>
        </message>
        <message>
            <source>Whichever is faster</source>
            <translation>哪个快用哪个</translation>
        </message>
        <message>
            <source>Processor computes</source>
            <translation>由处理器计算</translation>
        </message>
        <message>
            <source>Card fetches</source>
            <translation>传到显卡</translation>
        </message>
        <message>
            <source>Nothing is kept</source>
            <translation>不保留</translation>
        </message>
        <message>
            <source>Whole layers</source>
            <translation>整层</translation>
        </message>
        <message>
            <source>Guessing which experts come next</source>
            <translation>预测接下来的专家</translation>
        </message>
        <message>
            <source>Guessed experts are copied to the card in advance. Automatic uses what pays off, if anything does.</source>
            <translation>预测到的专家会提前复制到显卡。自动会采用确有收益的方式（如果有）。</translation>
        </message>
        <message>
            <source>Off</source>
            <translation>关</translation>
        </message>
        <message>
            <source>Those of the last token</source>
            <translation>上一个 token 用到的</translation>
        </message>
        <message>
            <source>The next layer’s router</source>
            <translation>下一层的路由器</translation>
        </message>
        <message>
            <source>What usually follows</source>
            <translation>通常随后出现的</translation>
        </message>
        <message>
            <source>A trained predictor</source>
            <translation>训练过的预测器</translation>
        </message>
        <message>
            <source>Replay steps on the card</source>
            <translation>在显卡上重放步骤</translation>
        </message>
        <message>
            <source>The card replays a recorded step (a CUDA graph) instead of being told each operation.</source>
            <translation>显卡重放录制好的步骤（CUDA 图），而不必逐个接收操作。</translation>
        </message>
        <message>
            <source>On</source>
            <translation>开</translation>
        </message>
        <message>
            <source>Several graphics cards</source>
            <translation>多张显卡</translation>
        </message>
        <message>
            <source>By layers, each card has a run of layers; by experts, each has a part of every layer’s experts.</source>
            <translation>按层：每张显卡负责一段连续的层；按专家：每张显卡负责每层的一部分专家。</translation>
        </message>
        <message>
            <source>By layers</source>
            <translation>按层</translation>
        </message>
        <message>
            <source>By experts</source>
            <translation>按专家</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>模型</translation>
        </message>
        <message>
            <source>Speculative decoding</source>
            <translation>推测解码</translation>
        </message>
        <message>
            <source>Answers that quote, such as edits of a text, come faster: likely next words are tried together, only as long as that pays. Answers stay the same.</source>
            <translation>对于引用原文的回答（例如修改文本），速度会更快：把可能的后续词语一起尝试，仅在有收益时进行。回答内容不变。</translation>
        </message>
        <message>
            <source>Where it pays</source>
            <translation>有收益时</translation>
        </message>
        <message>
            <source>With the model’s own layer</source>
            <translation>用模型自带的层</translation>
        </message>
        <message>
            <source>Keys and values</source>
            <translation>键和值</translation>
        </message>
        <message>
            <source>What the model keeps of a conversation. int8 takes about half the memory; answers may differ slightly (with the starter, perplexity rose by 0.08%).</source>
            <translation>模型对对话保留的内容。int8 约节省一半内存；回答可能略有差异（入门模型的困惑度上升 0.08%）。</translation>
        </message>
        <message>
            <source>As in the model</source>
            <translation>与模型一致</translation>
        </message>
        <message>
            <source>Appearance</source>
            <translation>外观</translation>
        </message>
        <message>
            <source>Theme</source>
            <translation>主题</translation>
        </message>
        <message>
            <source>System follows the desktop's setting.</source>
            <translation>“系统”跟随桌面的设置。</translation>
        </message>
        <message>
            <source>System</source>
            <translation>系统</translation>
        </message>
        <message>
            <source>Light</source>
            <translation>浅色</translation>
        </message>
        <message>
            <source>Dark</source>
            <translation>深色</translation>
        </message>
        <message>
            <source>Language</source>
            <translation>语言</translation>
        </message>
        <message>
            <source>System is the language of this PC, or English.</source>
            <translation>“系统”即这台电脑的语言，没有译文时为英语。</translation>
        </message>
        <message>
            <source>Text size</source>
            <translation>文字大小</translation>
        </message>
        <message>
            <source>Of everything in this window.</source>
            <translation>适用于整个窗口。</translation>
        </message>
        <message>
            <source>Default model</source>
            <translation>默认模型</translation>
        </message>
        <message>
            <source>Loaded when Switchyard starts.</source>
            <translation>Switchyard 启动时加载。</translation>
        </message>
        <message>
            <source>Free the memory after</source>
            <translation>多久后释放内存</translation>
        </message>
        <message>
            <source>If the model is not used for this long; the next question loads it again.</source>
            <translation>在此时间内没有人使用模型则释放；下次提问会重新加载。</translation>
        </message>
        <message>
            <source>Never</source>
            <translation>从不</translation>
        </message>
        <message>
            <source>Batch jobs at once</source>
            <translation>同时运行的批处理任务</translation>
        </message>
        <message>
            <source>They share each pass through the model; others wait for their turn.</source>
            <translation>它们共用模型的每次遍历；其余任务依次等待。</translation>
        </message>
        <message>
            <source>Quick question</source>
            <translation>快速提问</translation>
        </message>
        <message>
            <source>Icon in the tray</source>
            <translation>托盘图标</translation>
        </message>
        <message>
            <source>Click it to ask a question from anywhere, in a small window above the others.</source>
            <translation>点击图标即可随处提问，小窗口显示在其他窗口之上。</translation>
        </message>
        <message>
            <source>Keep running when the window is closed</source>
            <translation>关闭窗口后继续运行</translation>
        </message>
        <message>
            <source>The model stays in memory, and answers and batch jobs go on. Quit from the icon’s menu or with Ctrl+Q.</source>
            <translation>模型留在内存中，回答和批处理任务继续进行。请从图标菜单或按 Ctrl+Q 退出。</translation>
        </message>
        <message>
            <source>API server</source>
            <translation>API 服务器</translation>
        </message>
        <message>
            <source>Let apps use the models of this PC</source>
            <translation>允许其他应用使用这台电脑的模型</translation>
        </message>
        <message>
            <source>Who may use it</source>
            <translation>谁可以使用</translation>
        </message>
        <message>
            <source>This PC</source>
            <translation>这台电脑</translation>
        </message>
        <message>
            <source>This PC, with key</source>
            <translation>这台电脑，需密钥</translation>
        </message>
        <message>
            <source>Network, with key</source>
            <translation>网络，需密钥</translation>
        </message>
        <message>
            <source>Port</source>
            <translation>端口</translation>
        </message>
        <message>
            <source>Choose another if a program on this PC already uses it.</source>
            <translation>如果已被本机程序占用，请换一个。</translation>
        </message>
        <message>
            <source>Free them after</source>
            <translation>多久后释放</translation>
        </message>
        <message>
            <source>A model that a program asked for is freed once no program has used it for this long.</source>
            <translation>程序请求的模型在此时间内没有程序使用即会释放。</translation>
        </message>
        <message>
            <source>Keep loaded</source>
            <translation>保持加载</translation>
        </message>
        <message>
            <source>My model makes room for them</source>
            <translation>我的模型为其让位</translation>
        </message>
        <message>
            <source>Where both do not fit, yours is put aside, and loaded again for your next question.</source>
            <translation>如果两者放不下，您的模型会先被移出，下次提问时重新加载。</translation>
        </message>
        <message>
            <source>Monitor</source>
            <translation>监视器</translation>
        </message>
        <message>
            <source>Record sessions</source>
            <translation>录制会话</translation>
        </message>
        <message>
            <source>Timings and counters that the Monitor can open later: no prompts, no answers. They stay on this machine and take up to 512 MB; the oldest are deleted.</source>
            <translation>监视器以后可以打开的计时和计数：不含提示词和回答。保存在本机，最多占用 512 MB；最早的会被删除。</translation>
        </message>
        <message>
            <source>Updates</source>
            <translation>更新</translation>
        </message>
        <message>
            <source>Check for updates</source>
            <translation>检查更新</translation>
        </message>
        <message>
            <source>Once a day, at the start. Nothing about you is sent, and nothing is downloaded without asking.</source>
            <translation>每天一次，在启动时检查。不会发送您的任何信息，也不会未经询问就下载。</translation>
        </message>
        <message>
            <source>Temperature</source>
            <translation>温度</translation>
        </message>
        <message>
            <source>0 always takes the likeliest token; higher is more varied</source>
            <translation>0 始终取概率最高的 token；越高越多样</translation>
        </message>
        <message>
            <source>Top-k</source>
            <translation>Top-k</translation>
        </message>
        <message>
            <source>Sample from the k likeliest tokens</source>
            <translation>从概率最高的 k 个 token 中采样</translation>
        </message>
        <message>
            <source>off</source>
            <translation>关</translation>
        </message>
        <message>
            <source>Top-p</source>
            <translation>Top-p</translation>
        </message>
        <message>
            <source>Sample from the likeliest tokens with a total probability of p; 1 is off</source>
            <translation>从总概率为 p 的最可能的 token 中采样；1 为关闭</translation>
        </message>
        <message>
            <source>Min-p</source>
            <translation>Min-p</translation>
        </message>
        <message>
            <source>Drop tokens below this share of the likeliest one's probability; 0 is off</source>
            <translation>舍弃低于最可能 token 概率此比例的 token；0 为关闭</translation>
        </message>
        <message>
            <source>Repetition penalty</source>
            <translation>重复惩罚</translation>
        </message>
        <message>
            <source>Above 1, tokens already used become less likely; 1 is off</source>
            <translation>大于 1 时，已使用的 token 更不易出现；1 为关闭</translation>
        </message>
        <message>
            <source>Seed</source>
            <translation>随机种子</translation>
        </message>
        <message>
            <source>The same seed gives the same answer to the same chat</source>
            <translation>相同的种子对同一对话给出相同的回答</translation>
        </message>
        <message>
            <source>random</source>
            <translation>随机</translation>
        </message>
        <message>
            <source>Stop strings</source>
            <translation>停止文本</translation>
        </message>
        <message>
            <source>An answer ends before the first of these</source>
            <translation>回答在其中任一文本出现之前结束</translation>
        </message>
        <message>
            <source>Max tokens</source>
            <translation>token 上限</translation>
        </message>
        <message>
            <source>Answers stop at this length</source>
            <translation>回答到此长度即停止</translation>
        </message>
        <message>
            <source>Beams</source>
            <translation>束宽</translation>
        </message>
        <message>
            <source>Beam search if above 1; ignores temperature, top-k, top-p and min-p</source>
            <translation>大于 1 时使用束搜索；忽略温度、top-k、top-p 和 min-p</translation>
        </message>
        <message>
            <source>Loop guard</source>
            <translation>防循环</translation>
        </message>
        <message>
            <source>Ends loops (DRY): what would repeat earlier text becomes less likely; 0 is off, 0.8 is usual</source>
            <translation>终止循环（DRY）：会重复前文的内容更不易出现；0 为关闭，常用 0.8</translation>
        </message>
        <message>
            <source>Guard: growth</source>
            <translation>防循环：增幅</translation>
        </message>
        <message>
            <source>How much stronger the loop guard gets with each repeated token</source>
            <translation>每多重复一个 token，防循环增强多少</translation>
        </message>
        <message>
            <source>Guard: length</source>
            <translation>防循环：长度</translation>
        </message>
        <message>
            <source>Repetitions shorter than this many tokens are free</source>
            <translation>短于此 token 数的重复不受限制</translation>
        </message>
        <message>
            <source>Guard: range</source>
            <translation>防循环：范围</translation>
        </message>
        <message>
            <source>How many of the last tokens, earlier messages included, are searched; by default only the answer</source>
            <translation>检查最近多少个 token（含较早的消息）；默认仅检查回答</translation>
        </message>
        <message>
            <source>answer</source>
            <translation>回答</translation>
        </message>
        <message>
            <source>Guard: ends at</source>
            <translation>防循环：止于</translation>
        </message>
        <message>
            <source>Repetitions are not followed across these texts; \n is a line break</source>
            <translation>不跨越这些文本追踪重复；\n 表示换行</translation>
        </message>
        <message>
            <source>Presence penalty</source>
            <translation>存在惩罚</translation>
        </message>
        <message>
            <source>Makes every token that the answer has already less likely, once; 0 is off</source>
            <translation>使回答中已有的每个 token 一次性降低概率；0 为关闭</translation>
        </message>
        <message>
            <source>Frequency penalty</source>
            <translation>频率惩罚</translation>
        </message>
        <message>
            <source>Makes tokens less likely with each time that the answer has them already; 0 is off</source>
            <translation>回答中每出现一次，就再降低该 token 的概率；0 为关闭</translation>
        </message>
        <message>
            <source>Thinking</source>
            <translation>思考</translation>
        </message>
        <message>
            <source>Whether the model reasons before it answers; its thoughts count as tokens of the answer</source>
            <translation>模型是否先推理再回答；思考计入回答的 token</translation>
        </message>
        <message>
            <source>As the model does</source>
            <translation>由模型决定</translation>
        </message>
        <message>
            <source>Low</source>
            <translation>低</translation>
        </message>
        <message>
            <source>Medium</source>
            <translation>中</translation>
        </message>
        <message>
            <source>High</source>
            <translation>高</translation>
        </message>
        <message>
            <source>Keep chats' computed context on disk</source>
            <translation>将对话已计算的上下文保存在磁盘上</translation>
        </message>
        <message>
            <source>A chat then goes on at once after another one or a restart: what the model has read need not be read again. It is made of your prompts and answers, encrypted, and removed with its chat. The key is in the system's keyring; where there is none it is a file beside the settings, and whoever can read your files can decrypt it. Turning this off removes what is kept.</source>
            <translation>这样，切换对话或重启之后也能立即接着对话：模型读过的内容无需再读。它由您的提示词和回答生成，经过加密，并随对话一起删除。密钥保存在系统密钥环中；没有密钥环时则是设置旁边的一个文件，能读取您文件的人就能解密。关闭此项会删除已保存的内容。</translation>
        </message>
        <message>
            <source>At most</source>
            <translation>最多</translation>
        </message>
        <message>
            <source>What was of no use for longest is removed first. 2 GB of the disk always stay free.</source>
            <translation>最先删除最久没有用处的内容。始终保留 2 GB 的磁盘空闲空间。</translation>
        </message>
    </context>
    <context>
        <name>Settings</name>
        <message>
            <source>The settings could not be saved to {0} ({1}); free some space or check its permissions.</source>
            <translation>无法将设置保存到 {0}（{1}）；请腾出空间或检查权限。</translation>
        </message>
        <message>
            <source>The settings in {0} could not be read ({1}), so the defaults are used.</source>
            <translation>无法读取 {0} 中的设置（{1}），因此使用默认值。</translation>
        </message>
        <message>
            <source>Some settings in {0} make no sense ({1}): the usual ones are used instead of these.</source>
            <translation>{0} 中有些设置无效（{1}）：这些设置改用默认值。</translation>
        </message>
        <message>
            <source>The settings file was damaged; it is kept as {0}, and the defaults are used.</source>
            <translation>设置文件已损坏；保留为 {0}，并使用默认值。</translation>
        </message>
    </context>
    <context>
        <name>SettingsCard</name>
        <message>
            <source>Hide</source>
            <translation>隐藏</translation>
        </message>
        <message>
            <source>Show</source>
            <translation>显示</translation>
        </message>
        <message>
            <source>Needs a reload.</source>
            <translation>需要重新加载。</translation>
        </message>
        <message>
            <source>Needs a restart.</source>
            <translation>需要重启。</translation>
        </message>
        <message>
            <source>{0} px</source>
            <translation>{0} px</translation>
        </message>
        <message>
            <source>all that is free</source>
            <translation>全部空闲空间</translation>
        </message>
        <message>
            <source>at most {0}</source>
            <translation>最多 {0}</translation>
        </message>
        <message>
            <source>none; separate with commas</source>
            <translation>无；用逗号分隔</translation>
        </message>
    </context>
    <context>
        <name>SettingsPage</name>
        <message>
            <source>This desktop has no tray for icons.</source>
            <translation>此桌面没有可放图标的托盘。</translation>
        </message>
        <message>
            <source>No setting has these words.</source>
            <translation>没有包含这些词的设置。</translation>
        </message>
        <message>
            <source>Find a setting</source>
            <translation>查找设置</translation>
        </message>
        <message>
            <source>Settings</source>
            <translation>设置</translation>
        </message>
    </context>
    <context>
        <name>SharedSettingsCard</name>
        <message>
            <source>Template</source>
            <translation>模板</translation>
        </message>
        <message>
            <source>Input</source>
            <translation>输入</translation>
        </message>
        <message>
            <source>Result</source>
            <translation>结果</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>模型</translation>
        </message>
        <message>
            <source>Answered by</source>
            <translation>回答方</translation>
        </message>
        <message>
            <source>Max tokens</source>
            <translation>token 上限</translation>
        </message>
        <message>
            <source>Temperature</source>
            <translation>温度</translation>
        </message>
        <message>
            <source>Answer must be</source>
            <translation>回答的形式</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>系统提示词</translation>
        </message>
        <message>
            <source>Each row's own messages</source>
            <translation>各行自己的消息</translation>
        </message>
        <message>
            <source>JSON with a schema</source>
            <translation>符合架构的 JSON</translation>
        </message>
        <message>
            <source>one of {0}</source>
            <translation>以下之一：{0}</translation>
        </message>
        <message>
            <source>text</source>
            <translation>文本</translation>
        </message>
        <message>
            <source>0 (the likeliest token)</source>
            <translation>0（概率最高的 token）</translation>
        </message>
        <message>
            <source>none</source>
            <translation>无</translation>
        </message>
        <message>
            <source>the servers' own</source>
            <translation>服务器的设置</translation>
        </message>
        <message>
            <source>the loaded one</source>
            <translation>已加载的模型</translation>
        </message>
        <message>
            <source>this PC</source>
            <translation>这台电脑</translation>
        </message>
        <message>
            <source>the Ray cluster at {0}</source>
            <translation>Ray 集群（{0}）</translation>
        </message>
    </context>
    <context>
        <name>ShortcutsDialog</name>
        <message>
            <source>Keyboard shortcuts</source>
            <translation>键盘快捷键</translation>
        </message>
    </context>
    <context>
        <name>SideBySide</name>
        <message>
            <source>Side by side</source>
            <translation>并排比较</translation>
        </message>
        <message>
            <source>Question for both</source>
            <translation>给两者的问题</translation>
        </message>
        <message>
            <source>One question for both</source>
            <translation>向两者提同一个问题</translation>
        </message>
        <message>
            <source>Ask both</source>
            <translation>询问两者</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>关闭</translation>
        </message>
        <message>
            <source>The model here</source>
            <translation>本机的模型</translation>
        </message>
        <message>
            <source>its only model</source>
            <translation>其唯一的模型</translation>
        </message>
        <message>
            <source>This chat is being answered: wait for the end, or stop it.</source>
            <translation>此对话正在回答：请等待结束，或将其停止。</translation>
        </message>
        <message>
            <source>Stop</source>
            <translation>停止</translation>
        </message>
        <message>
            <source>Choose another model or other settings for one of them.</source>
            <translation>请为其中一个选择其他模型或其他设置。</translation>
        </message>
        <message>
            <source>One model is open at a time on this PC: the second is loaded when the first has answered.</source>
            <translation>这台电脑一次只打开一个模型：第一个回答完后再加载第二个。</translation>
        </message>
        <message>
            <source>Both answers are kept in the chat, as versions of one turn.</source>
            <translation>两个回答都保留在对话中，作为同一条消息的不同版本。</translation>
        </message>
    </context>
    <context>
        <name>Sidebar</name>
        <message>
            <source>Navigation</source>
            <translation>导航</translation>
        </message>
        <message>
            <source>Go to {0}</source>
            <translation>转到{0}</translation>
        </message>
    </context>
    <context>
        <name>SizeChooser</name>
        <message>
            <source>Experts kept in this tier</source>
            <translation>这一级保留的专家</translation>
        </message>
        <message>
            <source>Experts kept</source>
            <translation>保留的专家</translation>
        </message>
        <message>
            <source>Resize</source>
            <translation>调整大小</translation>
        </message>
        <message>
            <source>Lasts until the model is reloaded; Tune sets a permanent size.</source>
            <translation>在重新加载模型之前有效；永久大小由“调优”设定。</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>撤销</translation>
        </message>
    </context>
    <context>
        <name>SourceRow</name>
        <message>
            <source>Sources</source>
            <translation>来源</translation>
        </message>
        <message>
            <source> p. {0}</source>
            <translation>第 {0} 页</translation>
        </message>
        <message>
            <source>Source {0}: {1}</source>
            <translation>来源 {0}：{1}</translation>
        </message>
    </context>
    <context>
        <name>StarterDownload</name>
        <message>
            <source>The download could not be started: reinstall Switchyard.</source>
            <translation>无法开始下载：请重新安装 Switchyard。</translation>
        </message>
        <message>
            <source>The starter model could not be built; try again.</source>
            <translation>无法生成入门模型；请重试。</translation>
        </message>
    </context>
    <context>
        <name>StarterOffer</name>
        <message>
            <source>Download of the starter model</source>
            <translation>下载入门模型</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>取消</translation>
        </message>
        <message>
            <source>Try again</source>
            <translation>重试</translation>
        </message>
        <message>
            <source>Get the starter (93 MB)</source>
            <translation>获取入门模型 (93 MB)</translation>
        </message>
        <message>
            <source>Getting the starter model…</source>
            <translation>正在获取入门模型…</translation>
        </message>
        <message>
            <source>Stopping…</source>
            <translation>正在停止…</translation>
        </message>
        <message>
            <source>Getting the starter model, {0}% done…</source>
            <translation>正在获取入门模型，已完成 {0}%…</translation>
        </message>
    </context>
    <context>
        <name>StepBar</name>
        <message>
            <source>Steps</source>
            <translation>步骤</translation>
        </message>
        <message>
            <source>Your machine</source>
            <translation>您的机器</translation>
        </message>
        <message>
            <source>Measure</source>
            <translation>测量</translation>
        </message>
        <message>
            <source>Plan</source>
            <translation>方案</translation>
        </message>
        <message>
            <source>Timed tokens</source>
            <translation>实测</translation>
        </message>
        <message>
            <source>Step {0}: {1}</source>
            <translation>步骤 {0}：{1}</translation>
        </message>
        <message>
            <source>Alt+{0}</source>
            <translation>Alt+{0}</translation>
        </message>
    </context>
    <context>
        <name>SummaryCard</name>
        <message>
            <source>Open Tune</source>
            <translation>打开调优</translation>
        </message>
        <message>
            <source>The engine is starting.</source>
            <translation>正在启动引擎。</translation>
        </message>
        <message>
            <source>The model is loading.</source>
            <translation>正在加载模型。</translation>
        </message>
        <message>
            <source>The engine has stopped.</source>
            <translation>引擎已停止。</translation>
        </message>
        <message>
            <source>Its recording is still here; the machine's lanes continue.</source>
            <translation>其录制内容仍在；机器的轨道继续。</translation>
        </message>
        <message>
            <source>Nothing computed yet.</source>
            <translation>还没有计算任何内容。</translation>
        </message>
        <message>
            <source>Ask something in Chat and watch it here.</source>
            <translation>在“对话”中提问，并在这里观察。</translation>
        </message>
        <message>
            <source>No model is loaded.</source>
            <translation>未加载模型。</translation>
        </message>
        <message>
            <source>The machine is still shown. Load a model in Settings, then ask something in Chat.</source>
            <translation>机器状态仍会显示。请在“设置”中加载模型，然后在“对话”中提问。</translation>
        </message>
        <message>
            <source>Nothing was decoded in this session.</source>
            <translation>此会话中没有解码任何内容。</translation>
        </message>
        <message>
            <source>Nothing has been decoded yet.</source>
            <translation>还没有解码任何内容。</translation>
        </message>
        <message>
            <source>Their time went to: {0}.</source>
            <translation>时间用于：{0}。</translation>
        </message>
        <message>
            <source>Its time went to: {0}.</source>
            <translation>时间用于：{0}。</translation>
        </message>
        <message>
            <source>Other programs used {0}% of the CPU, which slows everything down.</source>
            <translation>其他程序占用了 {0}% 的 CPU，拖慢了一切。</translation>
        </message>
        <message>
            <source>A picture was read first, in {0} s.</source>
            <translation>此前读取了 1 张图片，用时 {0} 秒。</translation>
        </message>
        <message>
            <source>{0} pictures were read first, in {1} s.</source>
            <translation>此前读取了 {0} 张图片，用时 {1} 秒。</translation>
        </message>
        <message>
            <source>Batch: last {0} tokens, {1} per step, {2}/s.</source>
            <translation>批处理：最近 {0} 个 token，每步 {1} 个，{2}/秒。</translation>
        </message>
        <message>
            <source>The last token took {0} ms.</source>
            <translation>上一个 token 用时 {0} ms。</translation>
        </message>
        <message numerus="yes">
            <source>Last {0} tokens, {1}/s.</source>
            <translation>
                <numerusform>最近 {0} 个 token，{1}/秒。</numerusform>
            </translation>
        </message>
        <message>
            <source>Close or pause them first; further advice needs an idle machine.</source>
            <translation>请先关闭或暂停它们；进一步的建议需要机器空闲。</translation>
        </message>
        <message>
            <source>{0} CPU threads would be about {1} times as fast (predicted).</source>
            <translation>{0} 个 CPU 线程约为 {1} 倍速度（预测）。</translation>
        </message>
        <message>
            <source>With {0} experts kept in VRAM it would be about {1} times as fast (predicted).</source>
            <translation>将 {0} 个专家保留在显存中，速度约为现在的 {1} 倍（预测）。</translation>
        </message>
        <message>
            <source>With {0} experts kept in RAM it would be about {1} times as fast (predicted).</source>
            <translation>将 {0} 个专家保留在内存中，速度约为现在的 {1} 倍（预测）。</translation>
        </message>
        <message>
            <source>{0} weights would be about {1} times as fast (predicted).</source>
            <translation>{0} 权重约为 {1} 倍速度（预测）。</translation>
        </message>
        <message>
            <source>No single change is predicted to gain over 5%.</source>
            <translation>预计没有任何单项更改能带来超过 5% 的提升。</translation>
        </message>
    </context>
    <context>
        <name>SystemPromptPopover</name>
        <message>
            <source>System prompt</source>
            <translation>系统提示词</translation>
        </message>
        <message>
            <source>Instructions the model reads first, such as who it is and how to answer.</source>
            <translation>模型最先读取的指令，例如它的身份和回答方式。</translation>
        </message>
        <message>
            <source>You are a helpful assistant that answers in one sentence.</source>
            <translation>你是一个乐于助人、用一句话回答的助手。</translation>
        </message>
    </context>
    <context>
        <name>TelemetryHub</name>
        <message>
            <source>{0} loaded</source>
            <translation>已加载 {0}</translation>
        </message>
        <message>
            <source>The engine ended unexpectedly</source>
            <translation>引擎意外结束</translation>
        </message>
        <message>
            <source>The engine ended</source>
            <translation>引擎已结束</translation>
        </message>
        <message>
            <source>The engine's clock jumped</source>
            <translation>引擎的时钟发生跳变</translation>
        </message>
        <message>
            <source>The session is no longer recorded: its file could not be written ({0}).</source>
            <translation>会话不再录制：无法写入其文件（{0}）。</translation>
        </message>
    </context>
    <context>
        <name>TemplateCard</name>
        <message>
            <source>Prompt for each row</source>
            <translation>每行的提示词</translation>
        </message>
        <message>
            <source>Template</source>
            <translation>模板</translation>
        </message>
        <message>
            <source>Click a column to insert it at the cursor; it stands for each row's own text.</source>
            <translation>点击某列可将其插入光标处；它代表各行自己的文本。</translation>
        </message>
        <message>
            <source>Column of pictures</source>
            <translation>图片列</translation>
        </message>
        <message>
            <source>Its cells are paths of pictures, which begin in the file's folder, for a model that sees</source>
            <translation>单元格是图片路径（相对于该文件所在的文件夹），供能看图片的模型使用</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>系统提示词</translation>
        </message>
        <message>
            <source>System prompt: instructions for every row (optional)</source>
            <translation>系统提示词：适用于每行的指令（可选）</translation>
        </message>
        <message>
            <source>Pictures: none</source>
            <translation>图片：无</translation>
        </message>
        <message>
            <source>Pictures: {0}</source>
            <translation>图片：{0}</translation>
        </message>
        <message>
            <source>Insert column {0}</source>
            <translation>插入列 {0}</translation>
        </message>
        <message>
            <source>Summarise in one line: {0}</source>
            <translation>用一行总结：{0}</translation>
        </message>
        <message>
            <source>Describe the picture.</source>
            <translation>请描述这张图片。</translation>
        </message>
        <message>
            <source>{0} reads text only, so rows with pictures get no answer: choose a model that sees.</source>
            <translation>{0} 只能读取文本，因此带图片的行得不到回答：请选择能看图片的模型。</translation>
        </message>
        <message>
            <source>Write a prompt that includes a column.</source>
            <translation>请写一个包含某列的提示词。</translation>
        </message>
    </context>
    <context>
        <name>Thought</name>
        <message>
            <source>Copy what it thought</source>
            <translation>复制思考内容</translation>
        </message>
        <message>
            <source>Thinking</source>
            <translation>思考</translation>
        </message>
        <message>
            <source>Fold what the model thought</source>
            <translation>折叠模型的思考</translation>
        </message>
        <message>
            <source>Show what the model thought</source>
            <translation>显示模型的思考</translation>
        </message>
        <message>
            <source>unfolded</source>
            <translation>已展开</translation>
        </message>
        <message>
            <source>folded</source>
            <translation>已折叠</translation>
        </message>
        <message>
            <source>What the model thought</source>
            <translation>模型的思考</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>已复制</translation>
        </message>
    </context>
    <context>
        <name>TierRow</name>
        <message>
            <source>Hit rate of the last three minutes of decoding, 0 to 100%</source>
            <translation>最近三分钟解码的命中率，0 至 100%</translation>
        </message>
        <message>
            <source>{0} hits</source>
            <translation>命中 {0}</translation>
        </message>
        <message>
            <source>{0}%</source>
            <translation>{0}%</translation>
        </message>
        <message>
            <source>{0}% overall</source>
            <translation>总计 {0}%</translation>
        </message>
        <message>
            <source>{0} of {1} experts</source>
            <translation>{0} / {1} 个专家</translation>
        </message>
        <message>
            <source>Since the model was loaded: {0} of {1} lookups</source>
            <translation>自模型加载以来：{1} 次查找中的 {0} 次</translation>
        </message>
    </context>
    <context>
        <name>Timeline</name>
        <message>
            <source>Lane</source>
            <translation>轨道</translation>
        </message>
        <message>
            <source>Last</source>
            <translation>最近</translation>
        </message>
        <message>
            <source>Average</source>
            <translation>平均</translation>
        </message>
        <message>
            <source>Max</source>
            <translation>上限</translation>
        </message>
        <message>
            <source>{0}, out</source>
            <translation>{0}，传出</translation>
        </message>
        <message>
            <source>{0}, whole machine</source>
            <translation>{0}，整台机器</translation>
        </message>
        <message>
            <source>Token of step {0}: {1}</source>
            <translation>第 {0} 步的 token：{1}</translation>
        </message>
        <message>
            <source>{0} tokens at {1}/s</source>
            <translation>{0} 个 token，{1}/秒</translation>
        </message>
        <message>
            <source>{0} hits per token</source>
            <translation>每 token 命中 {0}</translation>
        </message>
        <message>
            <source>{0} fetched</source>
            <translation>取入 {0}</translation>
        </message>
        <message>
            <source>{0} on the CPU</source>
            <translation>CPU {0}</translation>
        </message>
        <message>
            <source>layer {0}</source>
            <translation>第 {0} 层</translation>
        </message>
        <message>
            <source>expert {0}</source>
            <translation>专家 {0}</translation>
        </message>
        <message>
            <source>{0} {1} tokens</source>
            <translation>{0} {1} 个 token</translation>
        </message>
        <message>
            <source>This comes from a sensor or driver, not from the engine.</source>
            <translation>来自传感器或驱动，而非引擎。</translation>
        </message>
        <message>
            <source>sampling and bookkeeping</source>
            <translation>采样和管理</translation>
        </message>
        <message>
            <source>experts</source>
            <translation>专家</translation>
        </message>
        <message>
            <source>attention</source>
            <translation>注意力</translation>
        </message>
        <message>
            <source>hit</source>
            <translation>命中</translation>
        </message>
        <message>
            <source>fetched</source>
            <translation>取入</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>writing</source>
            <translation>生成中</translation>
        </message>
        <message>
            <source>reading</source>
            <translation>读取中</translation>
        </message>
        <message>
            <source>waiting</source>
            <translation>等待中</translation>
        </message>
        <message>
            <source>in the background</source>
            <translation>后台</translation>
        </message>
        <message>
            <source>written</source>
            <translation>生成</translation>
        </message>
        <message>
            <source>read</source>
            <translation>读取</translation>
        </message>
        <message>
            <source>of jobs</source>
            <translation>任务</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} / {1}</translation>
        </message>
        <message>
            <source>Move through time</source>
            <translation>在时间上移动</translation>
        </message>
        <message>
            <source>Move by almost a full view</source>
            <translation>移动将近一屏</translation>
        </message>
        <message>
            <source>Zoom in, zoom out</source>
            <translation>放大、缩小</translation>
        </message>
        <message>
            <source>Space</source>
            <translation>空格键</translation>
        </message>
        <message>
            <source>Freeze the view, or follow live</source>
            <translation>冻结视图，或实时跟随</translation>
        </message>
        <message>
            <source>Home</source>
            <translation>Home</translation>
        </message>
        <message>
            <source>Go back to now</source>
            <translation>回到当前</translation>
        </message>
        <message>
            <source>Move the crosshair; with Shift, farther</source>
            <translation>移动十字线；按住 Shift 移动更远</translation>
        </message>
        <message>
            <source>Select the previous or next token</source>
            <translation>选择上一个或下一个 token</translation>
        </message>
        <message>
            <source>Select a range</source>
            <translation>选择范围</translation>
        </message>
        <message>
            <source>Enter</source>
            <translation>Enter</translation>
        </message>
        <message>
            <source>Zoom to the selected token or range</source>
            <translation>放大到所选 token 或范围</translation>
        </message>
        <message>
            <source>Esc</source>
            <translation>Esc</translation>
        </message>
        <message>
            <source>Clear the selection</source>
            <translation>清除选择</translation>
        </message>
        <message>
            <source>waiting for {0}</source>
            <translation>正在等待 {0}</translation>
        </message>
        <message>
            <source>written at {0} ×{1}</source>
            <translation>在 {0} 生成 ×{1}</translation>
        </message>
        <message>
            <source>ceiling {0} GB/s</source>
            <translation>上限 {0} GB/s</translation>
        </message>
        <message>
            <source>token ticks</source>
            <translation>token 刻度</translation>
        </message>
    </context>
    <context>
        <name>TimelineCard</name>
        <message>
            <source>Hover to read every lane, drag to average, wheel or ↑ ↓ to zoom, ← → to move.</source>
            <translation>悬停读取各轨道，拖动取平均，滚轮或 ↑ ↓ 缩放，← → 移动。</translation>
        </message>
        <message>
            <source>Machine</source>
            <translation>机器</translation>
        </message>
        <message>
            <source>Lanes of the machine's own sensors, below the engine's</source>
            <translation>在引擎的轨道下方显示机器自身传感器的轨道</translation>
        </message>
        <message>
            <source>Show the machine's sensors</source>
            <translation>显示机器的传感器</translation>
        </message>
        <message>
            <source>Timeline as a table</source>
            <translation>时间线表格</translation>
        </message>
        <message>
            <source>Table</source>
            <translation>表格</translation>
        </message>
        <message>
            <source>The same lanes as numbers</source>
            <translation>以数字显示同样的轨道</translation>
        </message>
        <message>
            <source>Show the lanes as a table</source>
            <translation>以表格显示轨道</translation>
        </message>
    </context>
    <context>
        <name>TimelineStrip</name>
        <message>
            <source>Machine activity</source>
            <translation>机器活动</translation>
        </message>
        <message>
            <source>The last 20 seconds. Click for the Monitor.</source>
            <translation>最近 20 秒。点击打开监视器。</translation>
        </message>
    </context>
    <context>
        <name>TimelineView</name>
        <message>
            <source>Timeline</source>
            <translation>时间线</translation>
        </message>
        <message>
            <source>Arrow keys move and zoom, Space freezes, Home returns to now, comma and full stop move the crosshair, square brackets step through tokens, Enter zooms to a token. The table has the same data as text.</source>
            <translation>方向键移动和缩放，空格键冻结，Home 键回到当前，逗号和句号移动十字线，方括号逐个切换 token，Enter 放大到某个 token。表格以文本形式包含相同的数据。</translation>
        </message>
        <message>
            <source>now</source>
            <translation>当前</translation>
        </message>
    </context>
    <context>
        <name>TitleBar</name>
        <message>
            <source>Model: {0}</source>
            <translation>模型：{0}</translation>
        </message>
        <message>
            <source>Cancel loading</source>
            <translation>取消加载</translation>
        </message>
        <message>
            <source>Start a new chat</source>
            <translation>开始新对话</translation>
        </message>
        <message>
            <source>New chat</source>
            <translation>新对话</translation>
        </message>
        <message>
            <source>Ctrl N</source>
            <translation>Ctrl N</translation>
        </message>
        <message>
            <source>Chats  Ctrl+K</source>
            <translation>对话  Ctrl+K</translation>
        </message>
        <message>
            <source>List of chats</source>
            <translation>对话列表</translation>
        </message>
        <message>
            <source>Double-click or press F2 to rename</source>
            <translation>双击或按 F2 重命名</translation>
        </message>
        <message>
            <source>engine stopped</source>
            <translation>引擎已停止</translation>
        </message>
        <message>
            <source>engine not responding</source>
            <translation>引擎无响应</translation>
        </message>
        <message>
            <source>loading {0}</source>
            <translation>正在加载 {0}</translation>
        </message>
        <message>
            <source>starting the engine</source>
            <translation>正在启动引擎</translation>
        </message>
        <message>
            <source>no model loaded</source>
            <translation>未加载模型</translation>
        </message>
        <message>
            <source>tuned</source>
            <translation>已调优</translation>
        </message>
        <message>
            <source>server not in the list</source>
            <translation>服务器不在列表中</translation>
        </message>
        <message>
            <source>its only model</source>
            <translation>其唯一的模型</translation>
        </message>
        <message>
            <source>{0} · sent to {1}</source>
            <translation>{0} · 发送到 {1}</translation>
        </message>
        <message>
            <source>the model</source>
            <translation>模型</translation>
        </message>
        <message>
            <source>{0} experts per layer, {1} per token</source>
            <translation>每层 {0} 个专家，每 token {1} 个</translation>
        </message>
        <message>
            <source>Speed: of the last answer</source>
            <translation>速度：上一个回答</translation>
        </message>
    </context>
    <context>
        <name>TokenCard</name>
        <message>
            <source>Per token</source>
            <translation>每 token</translation>
        </message>
        <message>
            <source>What one token, a word or a part of one, costs on average. Of the experts that it used, a hit was already in the graphics card’s memory; a miss was fetched or computed on the processor.</source>
            <translation>一个 token（一个词或其一部分）的平均开销。所用专家中，命中的已在显存中；未命中的则取入或由处理器计算。</translation>
        </message>
        <message>
            <source>Experts used</source>
            <translation>所用专家</translation>
        </message>
        <message>
            <source>in VRAM (hit)</source>
            <translation>在显存中（命中）</translation>
        </message>
        <message>
            <source>fetched (miss)</source>
            <translation>取入（未命中）</translation>
        </message>
        <message>
            <source>on the CPU</source>
            <translation>在 CPU 上</translation>
        </message>
        <message>
            <source>Time</source>
            <translation>时间</translation>
        </message>
        <message>
            <source>To the GPU</source>
            <translation>到 GPU</translation>
        </message>
        <message>
            <source>From disk</source>
            <translation>来自磁盘</translation>
        </message>
        <message>
            <source>Energy</source>
            <translation>能耗</translation>
        </message>
        <message>
            <source>{0} ms</source>
            <translation>{0} ms</translation>
        </message>
        <message>
            <source>{0} J</source>
            <translation>{0} J</translation>
        </message>
        <message>
            <source>not available here</source>
            <translation>这里无法获取</translation>
        </message>
        <message>
            <source>Neither a graphics card nor the processor reports its power here (NVML, RAPL).</source>
            <translation>这里的显卡和处理器都不报告功率（NVML、RAPL）。</translation>
        </message>
        <message>
            <source>Power as graphics cards and processors report it, over the tokens' time; now {0} W.</source>
            <translation>显卡和处理器报告的功率，按 token 用时统计；当前 {0} W。</translation>
        </message>
        <message>
            <source>Mean of the last {0} tokens</source>
            <translation>最近 {0} 个 token 的平均</translation>
        </message>
        <message>
            <source>Mean of the last {0} batch tokens, {1} per step</source>
            <translation>最近 {0} 个批处理 token 的平均，每步 {1} 个</translation>
        </message>
    </context>
    <context>
        <name>TokenDialog</name>
        <message>
            <source>Save and download</source>
            <translation>保存并下载</translation>
        </message>
        <message>
            <source>Access to {0}</source>
            <translation>访问 {0}</translation>
        </message>
        <message>
            <source>1. Open the page of {0}, sign in, and accept what is asked there.</source>
            <translation>1. 打开 {0} 的页面，登录并接受其要求。</translation>
        </message>
        <message>
            <source>Open {0}</source>
            <translation>打开 {0}</translation>
        </message>
        <message>
            <source>2. Create an access token (reading is enough) in your settings there, and paste it here.</source>
            <translation>2. 在那里的设置中创建访问令牌（只读即可），并粘贴到这里。</translation>
        </message>
        <message>
            <source>Access token</source>
            <translation>访问令牌</translation>
        </message>
        <message>
            <source>Its makers ask you to accept their terms first</source>
            <translation>其作者要求先接受条款</translation>
        </message>
        <message>
            <source>It is kept in the system's keyring, or for this run only where there is none, and sent to {0} alone.</source>
            <translation>令牌保存在系统密钥环中（没有密钥环时仅限本次运行），并且只发送到 {0}。</translation>
        </message>
    </context>
    <context>
        <name>TokenRows</name>
        <message>
            <source>Remove token</source>
            <translation>移除令牌</translation>
        </message>
        <message>
            <source>Remove the token for {0}</source>
            <translation>移除 {0} 的令牌</translation>
        </message>
    </context>
    <context>
        <name>ToolServerDialog</name>
        <message>
            <source>Save</source>
            <translation>保存</translation>
        </message>
        <message>
            <source>Test</source>
            <translation>测试</translation>
        </message>
        <message>
            <source>Add a server with tools</source>
            <translation>添加工具服务器</translation>
        </message>
        <message>
            <source>Name</source>
            <translation>名称</translation>
        </message>
        <message>
            <source>for example files</source>
            <translation>例如 files</translation>
        </message>
        <message>
            <source>Command</source>
            <translation>命令</translation>
        </message>
        <message>
            <source>or address</source>
            <translation>或地址</translation>
        </message>
        <message>
            <source>Variables or headers</source>
            <translation>变量或请求头</translation>
        </message>
        <message>
            <source>NAME=value, one on each line</source>
            <translation>NAME=值，每行一个</translation>
        </message>
        <message>
            <source>Values are kept in the system's keyring, or for this run only where there is none. ${NAME} in a value is read from the environment.</source>
            <translation>值保存在系统密钥环中；没有密钥环时仅限本次运行。值中的 ${NAME} 从环境变量读取。</translation>
        </message>
        <message>
            <source>or JSON</source>
            <translation>或 JSON</translation>
        </message>
        <message>
            <source>The command has a quote that does not end: correct it.</source>
            <translation>命令中的引号未闭合：请更正。</translation>
        </message>
        <message>
            <source>Each variable or header is NAME=value, on a line of its own.</source>
            <translation>每个变量或请求头写作 NAME=值，各占一行。</translation>
        </message>
        <message>
            <source>Enter the variables or headers again: they are kept for the old command or address alone.</source>
            <translation>请重新输入变量或请求头：它们只为旧的命令或地址保存。</translation>
        </message>
        <message>
            <source>There is a server named {0}: choose another name.</source>
            <translation>已有名为 {0} 的服务器：请选择其他名称。</translation>
        </message>
        <message>
            <source>Starting…</source>
            <translation>正在启动…</translation>
        </message>
    </context>
    <context>
        <name>Tools</name>
        <message numerus="yes">
            <source>It answers: {0} tools.</source>
            <translation>
                <numerusform>已应答：{0} 个工具。</numerusform>
            </translation>
        </message>
        <message>
            <source>not allowed</source>
            <translation>未允许</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>失败</translation>
        </message>
        <message>
            <source>done in {0}</source>
            <translation>用时 {0}</translation>
        </message>
        <message>
            <source>stopped</source>
            <translation>已停止</translation>
        </message>
        <message>
            <source>running…</source>
            <translation>正在运行…</translation>
        </message>
        <message>
            <source>waits for you</source>
            <translation>等待您确认</translation>
        </message>
    </context>
    <context>
        <name>ToolsCard</name>
        <message>
            <source>Tools</source>
            <translation>工具</translation>
        </message>
        <message>
            <source>Calculator</source>
            <translation>计算器</translation>
        </message>
        <message>
            <source>Computes what models get wrong. Runs without asking.</source>
            <translation>计算模型容易算错的内容。运行时不询问。</translation>
        </message>
        <message>
            <source>Clock</source>
            <translation>时钟</translation>
        </message>
        <message>
            <source>Tells the date and the time. Runs without asking.</source>
            <translation>告知日期和时间。运行时不询问。</translation>
        </message>
        <message>
            <source>Read a file</source>
            <translation>读取文件</translation>
        </message>
        <message>
            <source>Of folders that are attached to the chat.</source>
            <translation>来自对话所附的文件夹。</translation>
        </message>
        <message>
            <source>Run a batch</source>
            <translation>运行批处理</translation>
        </message>
        <message>
            <source>Starts a job that answers a prompt for each of many rows.</source>
            <translation>启动一个任务，针对多行逐一回答同一提示词。</translation>
        </message>
        <message>
            <source>Search documents</source>
            <translation>搜索文档</translation>
        </message>
        <message>
            <source>Those that are attached to the chat. Runs without asking.</source>
            <translation>对话所附的文档。运行时不询问。</translation>
        </message>
        <message>
            <source>Offered to the model in chats where the switch at the message box is on. Before a tool runs you are asked, unless you allowed it.</source>
            <translation>在消息框开关打开的对话中提供给模型。除非您已允许，否则工具运行前会询问您。</translation>
        </message>
        <message>
            <source>Ask again for all</source>
            <translation>全部重新询问</translation>
        </message>
        <message>
            <source>Always allowed</source>
            <translation>始终允许</translation>
        </message>
        <message>
            <source>Add…</source>
            <translation>添加…</translation>
        </message>
        <message>
            <source>Add a server with tools</source>
            <translation>添加工具服务器</translation>
        </message>
        <message>
            <source>Programs or addresses that bring tools by the Model Context Protocol, such as a web search. A program runs on this PC with your rights: add only what you trust.</source>
            <translation>通过 Model Context Protocol 提供工具（如网络搜索）的程序或地址。程序以您的权限在此电脑上运行：请只添加您信任的。</translation>
        </message>
        <message>
            <source>MCP servers</source>
            <translation>MCP 服务器</translation>
        </message>
        <message>
            <source>No tool yet.</source>
            <translation>暂无工具。</translation>
        </message>
        <message>
            <source>Offer the tools of {0}</source>
            <translation>提供 {0} 的工具</translation>
        </message>
        <message>
            <source>Edit…</source>
            <translation>编辑…</translation>
        </message>
        <message>
            <source>Edit {0}</source>
            <translation>编辑 {0}</translation>
        </message>
        <message>
            <source>Remove</source>
            <translation>移除</translation>
        </message>
        <message>
            <source>Remove {0}</source>
            <translation>移除 {0}</translation>
        </message>
        <message>
            <source>Its variables or headers are known for this run only: this system has no keyring.</source>
            <translation>其变量或请求头仅限本次运行：此系统没有密钥环。</translation>
        </message>
        <message>
            <source>Its tools are asked for when a chat needs them.</source>
            <translation>对话需要时才查询其工具。</translation>
        </message>
        <message>
            <source>It offers no tools; its prompts and resources are not used here.</source>
            <translation>它不提供工具；其提示词和资源在此不使用。</translation>
        </message>
        <message numerus="yes">
            <source>{0} tools: {1}</source>
            <translation>
                <numerusform>{0} 个工具：{1}</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>Transcript</name>
        <message>
            <source>Conversation</source>
            <translation>对话内容</translation>
        </message>
        <message>
            <source>Jump to the latest</source>
            <translation>跳到最新</translation>
        </message>
    </context>
    <context>
        <name>Tray</name>
        <message>
            <source>Switchyard is still running</source>
            <translation>Switchyard 仍在运行</translation>
        </message>
        <message>
            <source>Its window is hidden; the icon here opens it, asks a question, or quits.</source>
            <translation>其窗口已隐藏；可用此图标打开窗口、提问或退出。</translation>
        </message>
        <message>
            <source>Quick question…</source>
            <translation>快速提问…</translation>
        </message>
        <message>
            <source>Open Switchyard</source>
            <translation>打开 Switchyard</translation>
        </message>
        <message>
            <source>Quit</source>
            <translation>退出</translation>
        </message>
    </context>
    <context>
        <name>Tune</name>
        <message>
            <source>measured on this machine</source>
            <translation>在本机测得</translation>
        </message>
        <message>
            <source>reported by the driver or the system</source>
            <translation>由驱动或系统报告</translation>
        </message>
        <message>
            <source>assumed, from data sheets</source>
            <translation>根据规格假设</translation>
        </message>
        <message>
            <source>about {0}</source>
            <translation>约 {0}</translation>
        </message>
        <message>
            <source>just measured</source>
            <translation>刚刚测得</translation>
        </message>
        <message>
            <source>The CPU computes everything.</source>
            <translation>全部由 CPU 计算。</translation>
        </message>
        <message>
            <source>{0} is part of the processor</source>
            <translation>{0} 是处理器的一部分</translation>
        </message>
        <message>
            <source>No graphics card</source>
            <translation>没有显卡</translation>
        </message>
        <message>
            <source>not used by the engine</source>
            <translation>引擎未使用</translation>
        </message>
        <message>
            <source>reported by the engine</source>
            <translation>由引擎报告</translation>
        </message>
        <message>
            <source>and {0} more: {1}</source>
            <translation>另有 {0} 个：{1}</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>{0}, emulated in RAM</source>
            <translation>{0}，在内存中模拟</translation>
        </message>
        <message>
            <source>{0}, {1} free</source>
            <translation>{0}，空闲 {1}</translation>
        </message>
        <message>
            <source>driver {0}</source>
            <translation>驱动 {0}</translation>
        </message>
        <message>
            <source>1 core</source>
            <translation>1 核</translation>
        </message>
        <message numerus="yes">
            <source>{0} cores</source>
            <translation>
                <numerusform>{0} 核</numerusform>
            </translation>
        </message>
        <message>
            <source>best with 1 thread</source>
            <translation>1 个线程最佳</translation>
        </message>
        <message numerus="yes">
            <source>best with {0} threads</source>
            <translation>
                <numerusform>{0} 个线程最佳</numerusform>
            </translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>the container's limit</source>
            <translation>容器的限制</translation>
        </message>
        <message>
            <source>the limit set for WSL</source>
            <translation>为 WSL 设定的限制</translation>
        </message>
        <message>
            <source>pinnable: {0}</source>
            <translation>可锁定：{0}</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>内存</translation>
        </message>
        <message>
            <source>It does not respond.</source>
            <translation>没有响应。</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>磁盘</translation>
        </message>
        <message>
            <source>{0} free</source>
            <translation>{0} 空闲</translation>
        </message>
        <message>
            <source>hard disk</source>
            <translation>硬盘</translation>
        </message>
        <message>
            <source>network share</source>
            <translation>网络共享</translation>
        </message>
        <message>
            <source>in memory</source>
            <translation>在内存中</translation>
        </message>
        <message>
            <source>disk of the host</source>
            <translation>主机的磁盘</translation>
        </message>
        <message>
            <source>disk</source>
            <translation>磁盘</translation>
        </message>
        <message>
            <source>{0} up</source>
            <translation>上行 {0}</translation>
        </message>
        <message>
            <source>{0} down</source>
            <translation>下行 {0}</translation>
        </message>
        <message>
            <source>reading RAM</source>
            <translation>读取内存</translation>
        </message>
        <message>
            <source>Looking up the hardware</source>
            <translation>正在检查硬件</translation>
        </message>
        <message>
            <source>Waiting for other programs, which use {0} of the CPU</source>
            <translation>正在等待占用 {0} CPU 的其他程序</translation>
        </message>
        <message>
            <source>Measuring {0}</source>
            <translation>正在测量{0}</translation>
        </message>
        <message>
            <source>Measuring</source>
            <translation>正在测量</translation>
        </message>
        <message>
            <source>Planning</source>
            <translation>正在规划</translation>
        </message>
        <message>
            <source>Loading: {0}</source>
            <translation>正在加载：{0}</translation>
        </message>
        <message>
            <source>Timing real tokens: {0}</source>
            <translation>正在用真实 token 测速：{0}</translation>
        </message>
        <message>
            <source>Loading {0} again</source>
            <translation>正在重新加载 {0}</translation>
        </message>
        <message>
            <source>Reading RAM</source>
            <translation>内存读取</translation>
        </message>
        <message>
            <source>CPU arithmetic</source>
            <translation>CPU 运算</translation>
        </message>
        <message>
            <source>Experts on the CPU</source>
            <translation>CPU 上的专家</translation>
        </message>
        <message>
            <source>GPU arithmetic</source>
            <translation>GPU 运算</translation>
        </message>
        <message>
            <source>Reading VRAM</source>
            <translation>显存读取</translation>
        </message>
        <message>
            <source>Experts on the GPU</source>
            <translation>GPU 上的专家</translation>
        </message>
        <message>
            <source>RAM to the card</source>
            <translation>内存到显卡</translation>
        </message>
        <message>
            <source>Card to RAM</source>
            <translation>显卡到内存</translation>
        </message>
        <message>
            <source>Reading the disk</source>
            <translation>磁盘读取</translation>
        </message>
        <message>
            <source>Decoding</source>
            <translation>解码</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} token/秒</translation>
        </message>
        <message>
            <source>About {0} tokens/s</source>
            <translation>约 {0} token/秒</translation>
        </message>
        <message>
            <source>predicted, {0} to {1} on an idle machine; first token after about {2} s</source>
            <translation>预测值，机器空闲时 {0} 至 {1}；首个 token 约 {2} 秒</translation>
        </message>
        <message>
            <source>measured with real tokens on {0}</source>
            <translation>于 {0} 用真实 token 测得</translation>
        </message>
        <message>
            <source>{0}: use this figure. The prediction was {1}, {2}% too high: it adds up what memory and processor can do, and leaves out the engine's overhead.</source>
            <translation>{0}：请以此数字为准。预测为 {1}，偏高 {2}%：它把内存和处理器的能力相加，未计引擎的开销。</translation>
        </message>
        <message>
            <source>{0}: use this figure. The prediction was {1}, {2}% too low: it is based on memory and processor measured one at a time, and together they are faster.</source>
            <translation>{0}：请以此数字为准。预测为 {1}，偏低 {2}%：它依据分别测量的内存和处理器，而两者一起工作时更快。</translation>
        </message>
        <message>
            <source>1 thread</source>
            <translation>1 个线程</translation>
        </message>
        <message numerus="yes">
            <source>{0} threads</source>
            <translation>
                <numerusform>{0} 个线程</numerusform>
            </translation>
        </message>
        <message>
            <source>all experts on the card</source>
            <translation>所有专家都在显卡上</translation>
        </message>
        <message>
            <source>{0} expert slots</source>
            <translation>{0} 个专家槽位</translation>
        </message>
        <message>
            <source>about {0}% hits</source>
            <translation>命中约 {0}%</translation>
        </message>
        <message>
            <source>Not enough disk space: {0} of experts need it, and {1} are free.</source>
            <translation>磁盘空间不足：专家需要 {0}，而空闲 {1}。</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>显存</translation>
        </message>
        <message>
            <source>experts read on demand</source>
            <translation>专家按需读取</translation>
        </message>
        <message>
            <source>layers read for each token</source>
            <translation>每个 token 读取各层</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>入门模型</translation>
        </message>
    </context>
    <context>
        <name>TuneCards</name>
        <message>
            <source>Your machine</source>
            <translation>您的机器</translation>
        </message>
        <message>
            <source>Wider links have more bandwidth; hollow ones are assumed.</source>
            <translation>线越粗带宽越高；空心线为假设值。</translation>
        </message>
        <message>
            <source>Looking up the hardware…</source>
            <translation>正在检查硬件…</translation>
        </message>
        <message>
            <source>Where to compute</source>
            <translation>在哪里计算</translation>
        </message>
    </context>
    <context>
        <name>TunePage</name>
        <message>
            <source>Tune</source>
            <translation>调优</translation>
        </message>
        <message>
            <source>What if…</source>
            <translation>假如…</translation>
        </message>
        <message>
            <source>Copy report</source>
            <translation>复制报告</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>关闭</translation>
        </message>
        <message>
            <source>Cancel tuning</source>
            <translation>取消调优</translation>
        </message>
        <message>
            <source>Your hardware has changed since the last tuning. {0} Tune again.</source>
            <translation>自上次调优以来硬件有变化。{0} 请重新调优。</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>入门模型</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>已复制</translation>
        </message>
    </context>
    <context>
        <name>UnsavedTextGuard</name>
        <message>
            <source>The latest messages are not saved.</source>
            <translation>最新的消息尚未保存。</translation>
        </message>
        <message>
            <source>If you close the window now, they are lost.</source>
            <translation>现在关闭窗口，这些消息将丢失。</translation>
        </message>
        <message>
            <source>Keep the window open</source>
            <translation>保持窗口打开</translation>
        </message>
        <message>
            <source>Close and lose them</source>
            <translation>关闭并丢弃</translation>
        </message>
    </context>
    <context>
        <name>Updates</name>
        <message>
            <source>The installation was stopped. Nothing has changed: try again.</source>
            <translation>安装已中断。没有任何变化：请重试。</translation>
        </message>
    </context>
    <context>
        <name>UpdatesCard</name>
        <message>
            <source>Check now</source>
            <translation>立即检查</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>下载</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>取消</translation>
        </message>
        <message>
            <source>Switchyard {0}</source>
            <translation>Switchyard {0}</translation>
        </message>
        <message>
            <source>Go back</source>
            <translation>还原</translation>
        </message>
        <message>
            <source>Previous version</source>
            <translation>上一个版本</translation>
        </message>
        <message>
            <source>the official one</source>
            <translation>官方服务器</translation>
        </message>
        <message>
            <source>Where newer versions come from. Only versions signed by Switchyard's developers are installed.</source>
            <translation>新版本的来源。只安装由 Switchyard 开发者签名的版本。</translation>
        </message>
        <message>
            <source>Update server</source>
            <translation>更新服务器</translation>
        </message>
        <message>
            <source>{0} is kept. Going back takes effect at the next start.</source>
            <translation>{0} 已保留。还原将在下次启动时生效。</translation>
        </message>
        <message>
            <source>There is none.</source>
            <translation>没有。</translation>
        </message>
        <message>
            <source>{0} is available ({1}).</source>
            <translation>{0} 可用（{1}）。</translation>
        </message>
        <message>
            <source>Not checked yet.</source>
            <translation>尚未检查。</translation>
        </message>
        <message>
            <source>Checking…</source>
            <translation>正在检查…</translation>
        </message>
        <message>
            <source>This is the newest version.</source>
            <translation>已是最新版本。</translation>
        </message>
        <message>
            <source>Downloading {0}…</source>
            <translation>正在下载 {0}…</translation>
        </message>
        <message>
            <source>{0} will be installed when answers and jobs are done.</source>
            <translation>{0} 将在回答和任务完成后安装。</translation>
        </message>
        <message>
            <source>Installing and testing {0}…</source>
            <translation>正在安装并测试 {0}…</translation>
        </message>
        <message>
            <source>Restart Switchyard to use the other version.</source>
            <translation>请重启 Switchyard 以使用另一个版本。</translation>
        </message>
        <message>
            <source>Nothing has changed.</source>
            <translation>没有任何变化。</translation>
        </message>
    </context>
    <context>
        <name>UserMessage</name>
        <message>
            <source>Copy</source>
            <translation>复制</translation>
        </message>
        <message>
            <source>Edit the message</source>
            <translation>编辑消息</translation>
        </message>
        <message>
            <source>Ask this of every row of a file</source>
            <translation>对文件的每一行提问</translation>
        </message>
        <message>
            <source>Delete this message</source>
            <translation>删除此消息</translation>
        </message>
        <message>
            <source>You: {0}</source>
            <translation>您：{0}</translation>
        </message>
        <message>
            <source>Edit message</source>
            <translation>编辑消息</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>取消</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>保存</translation>
        </message>
        <message>
            <source>Changes the message; the answers after it stay.</source>
            <translation>修改消息；其后的回答保留。</translation>
        </message>
        <message>
            <source>Send as new version</source>
            <translation>作为新版本发送</translation>
        </message>
    </context>
    <context>
        <name>VersionSwitch</name>
        <message>
            <source>Earlier version</source>
            <translation>上一版本</translation>
        </message>
        <message>
            <source>Later version</source>
            <translation>下一版本</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} / {1}</translation>
        </message>
    </context>
    <context>
        <name>Versions</name>
        <message>
            <source>You started Switchyard {0}, and this window is {1}: close it, then start the other.</source>
            <translation>您启动的是 Switchyard {0}，而此窗口是 {1}：请先关闭此窗口，再启动另一个。</translation>
        </message>
    </context>
    <context>
        <name>WhatIfCard</name>
        <message>
            <source>What if this machine had…</source>
            <translation>假如这台机器有…</translation>
        </message>
        <message>
            <source>A few letters, such as 4090</source>
            <translation>几个字符，例如 4090</translation>
        </message>
        <message>
            <source>Graphics card as it is</source>
            <translation>现有显卡</translation>
        </message>
        <message>
            <source> GB of VRAM</source>
            <translation> GB 显存</translation>
        </message>
        <message>
            <source>VRAM as it is</source>
            <translation>现有显存</translation>
        </message>
        <message>
            <source> GB of RAM</source>
            <translation> GB 内存</translation>
        </message>
        <message>
            <source>RAM as it is</source>
            <translation>现有内存</translation>
        </message>
        <message>
            <source> GB/s to the card</source>
            <translation> GB/s 至显卡</translation>
        </message>
        <message>
            <source>Link as it is</source>
            <translation>现有连接</translation>
        </message>
        <message>
            <source> GB/s from disk</source>
            <translation> GB/s 磁盘</translation>
        </message>
        <message>
            <source>Disk as it is</source>
            <translation>现有磁盘</translation>
        </message>
        <message>
            <source>Graphics card</source>
            <translation>显卡</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>显存</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>内存</translation>
        </message>
        <message>
            <source>Link to the card</source>
            <translation>与显卡的连接</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>磁盘</translation>
        </message>
        <message>
            <source>Reset</source>
            <translation>重置</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>关闭</translation>
        </message>
        <message>
            <source>Change something above to see its effect.</source>
            <translation>更改上面的项目即可看到效果。</translation>
        </message>
        <message>
            <source>The link needs a graphics card: choose one first.</source>
            <translation>连接需要显卡：请先选择一块。</translation>
        </message>
        <message>
            <source>Planning…</source>
            <translation>正在规划…</translation>
        </message>
        <message>
            <source>It would fit, at about {0} tokens/s</source>
            <translation>放得下，约 {0} token/秒</translation>
        </message>
        <message>
            <source>About {1} tokens/s: as fast as now</source>
            <translation>约 {1} token/秒：与现在一样快</translation>
        </message>
        <message>
            <source>{0} tokens/s now, measured → about {1} predicted, {2} times as fast</source>
            <translation>现在 {0} token/秒（实测）→ 预测约 {1}，{2} 倍速度</translation>
        </message>
        <message>
            <source>About {0} → about {1} tokens/s, {2} times as fast</source>
            <translation>约 {0} → 约 {1} token/秒，{2} 倍速度</translation>
        </message>
    </context>
    <context>
        <name>WorkLine</name>
        <message>
            <source>Stop</source>
            <translation>停止</translation>
        </message>
    </context>
    <context>
        <name>WorkerProcess</name>
        <message>
            <source>The engine sent an invalid message: {0}</source>
            <translation>引擎发送了无效的消息：{0}</translation>
        </message>
        <message>
            <source>The engine could not be started ({0}): reinstall Switchyard.</source>
            <translation>无法启动引擎（{0}）：请重新安装 Switchyard。</translation>
        </message>
    </context>
    <context>
        <name>_GpuRow</name>
        <message>
            <source>Busy</source>
            <translation>占用</translation>
        </message>
        <message>
            <source>VRAM: ours; hatched: other programs</source>
            <translation>显存：我们的；斜线：其他程序</translation>
        </message>
        <message>
            <source>GPU {0}</source>
            <translation>GPU {0}</translation>
        </message>
        <message>
            <source>{0}% busy</source>
            <translation>占用 {0}%</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} / {1}</translation>
        </message>
        <message>
            <source>not responding</source>
            <translation>无响应</translation>
        </message>
        <message>
            <source>{0} GHz</source>
            <translation>{0} GHz</translation>
        </message>
        <message>
            <source>memory {0} GHz</source>
            <translation>显存 {0} GHz</translation>
        </message>
        <message>
            <source>{0} W</source>
            <translation>{0} W</translation>
        </message>
        <message>
            <source>{0} °C</source>
            <translation>{0} °C</translation>
        </message>
        <message>
            <source>PCIe {0} in, {1} out GB/s</source>
            <translation>PCIe 传入 {0}，传出 {1} GB/s</translation>
        </message>
        <message>
            <source>slowed by {0}</source>
            <translation>降速原因：{0}</translation>
        </message>
    </context>
</TS>
